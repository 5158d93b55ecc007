"""One process plays a rank of a world of any size, with the program's own functions, and counts what that costs."""
