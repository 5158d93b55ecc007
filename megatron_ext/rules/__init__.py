"""The rules of `validate`, by subject: each is a function that yields the problems it finds."""
