"""Trained models at work: scores of texts and generated ones, on all ranks of any layout."""
