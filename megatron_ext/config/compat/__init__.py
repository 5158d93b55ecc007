"""Names of options in other programs and versions, and their treatment here."""
