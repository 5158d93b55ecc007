"""What breaks a launch, looked for before it starts: tools/doctor.py."""
