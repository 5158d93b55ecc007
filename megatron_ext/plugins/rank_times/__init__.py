"""How the time of each rank divides into computing, communicating and waiting, and which rank is slow."""
