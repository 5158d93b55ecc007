"""Options and spellings of Megatron-LM and its forks, and their treatment here."""
