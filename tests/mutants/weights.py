"""Mistakes in reading weights, in merging patches into them, and in cutting them up."""

from __future__ import annotations

from .mutant import Mutant

PARTS = "test_unit_layout.py::test_the_parts_of_a_unit_are_each_element_once_and_begin_between_elements"
UNEVEN, EVEN = f"{PARTS}[3]", f"{PARTS}[5]"

MUTANTS = (
    Mutant(
        "other LoRAs of one shape count as a change of strength",
        "x is y if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor) else x == y",
        "x.shape == y.shape if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor) else x == y",
        ("test_patches.py::test_other_tensors_are_never_taken_for_a_change_of_strength",),
    ),
    Mutant(
        "weights of a unit are not aligned",
        "self.slots[name] = Slot(dtype, shape, -(-end // ALIGNMENT) * ALIGNMENT)",
        "self.slots[name] = Slot(dtype, shape, end)",
        (UNEVEN,),
    ),
    Mutant(
        "a range is a step longer where a unit can be cut evenly",
        "self.shard_bytes = max(1, -(-end // (ALIGNMENT * shards))) * ALIGNMENT",
        "self.shard_bytes = (end // (ALIGNMENT * shards) + 1) * ALIGNMENT",
        (EVEN,),
    ),
    Mutant(
        "a rank's part of a weight begins a range too late",
        "low = min(max(slot.start, begin), slot.stop)",
        "low = min(max(slot.start, begin + 64), slot.stop)",
        (UNEVEN,),
    ),
    Mutant(
        "a tensor may have other bytes than its shape needs",
        "if offsets[1] - offsets[0] != num_bytes:",
        "if offsets[1] - offsets[0] < num_bytes:",
        ("test_checkpoint.py::test_a_lying_header_is_refused_in_one_line",),
    ),
    Mutant(
        "a file written over at the same size counts as unchanged",
        "if (now.st_size, now.st_mtime_ns) != (self.size_bytes, self.mtime_ns):",
        "if now.st_size != self.size_bytes:",
        ("test_changed_file.py::test_a_file_replaced_before_it_is_loaded_is_refused",),
    ),
)
