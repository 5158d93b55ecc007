"""Gated delta rule: a linear recurrence over a state of each head, in the place of attention."""
