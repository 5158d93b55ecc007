"""Multi-head latent attention: keys and values of all heads out of one small vector of each token."""
