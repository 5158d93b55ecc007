"""Pages that a browser shows: charts, runs, and the reference of the library."""
