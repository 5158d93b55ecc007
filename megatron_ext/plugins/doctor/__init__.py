"""Looks for what breaks a launch, before it starts: tools/doctor.py."""
