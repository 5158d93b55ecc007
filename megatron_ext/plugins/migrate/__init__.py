"""Reads configuration files of other programs as flags of ours: one table for each program, one reader for all."""
