"""The direction from-deepspeed of `megatron-ext convert`."""

from megatron_ext.plugins.huggingface.importers import Importer

IMPORTERS = (Importer("from-deepspeed", "megatron_ext.plugins.migrate.deepspeed_checkpoint.importer:import_deepspeed"),)
