"""Describes model families of Hugging Face: a file for each, which holds everything that is peculiar to it.

    family = family_of(config)                         # or FAMILIES["llama"]
    for parameter in state_dict_mapping(config, family):
        print(parameter.name, [rows.tensor for rows in parameter.ranges])

`family.py` says what a family consists of, `registry.py` finds the families' files and the family of a configuration,
`state_dict_mapping.py` finds the rows of our parameters in a family's tensors, and `shared.py` holds what several
families have in common. `hf_config.py` reads and writes whole `config.json` files with them.
"""
