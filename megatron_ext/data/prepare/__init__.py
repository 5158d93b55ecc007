"""From text to .bin/.idx."""
