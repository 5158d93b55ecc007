"""A toy linear recurrence, in the place of attention."""
