"""Attention and Mamba-2 side by side: both read what one norm gives, and their sum is added to the residual stream."""
