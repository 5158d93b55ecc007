"""The engine's seams: every private name of megatron-core and torch that this program touches, in one table.

A seam is a name that is not part of the engine's API: a private attribute, function or module; a method of one of
megatron-core's classes that a class of ours overrides; an attribute that we set in place of the engine's own; and those
internals of its FSDP, buffers and optimizers without an underscore that we read. When a new version of torch or
megatron-core changes one of them, `problems` names it. `tests/checks/test_seams.py` walks the source and fails for an
access that the table does not name, and for a row that nothing uses any more; `tests/unit/seams/test_seam_canaries.py`
checks every row against the installed versions. Another table, `device/adaptation.py`, has megatron-core's assumptions
about CUDA and their replacements on a CPU.

    from megatron_ext.seams.seam import problems
    from megatron_ext.seams.table import SEAMS

    for seam in SEAMS:
        print(seam.name, problems(seam))
"""
