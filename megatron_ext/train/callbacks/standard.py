"""The callbacks that the flags ask for, in the order in which they hear of a step."""
