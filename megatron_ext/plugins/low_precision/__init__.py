"""Linear layers and experts whose products are computed in eight and four bits."""
