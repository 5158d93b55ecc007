"""Reads the command line: flags, files of flags, help."""
