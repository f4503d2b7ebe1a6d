"""Mistakes in the messages between the parent and its ranks, and in the memory that they share."""

from __future__ import annotations

from .mutant import Mutant

FIELDS = "test_protocol.py::test_each_field_is_checked"
SPEC = "test_protocol.py::test_a_tensor_spec_checks_what_it_is_given"
TRUNCATED = "test_protocol.py::test_every_truncation_and_every_trailing_byte_is_refused"

MUTANTS = (
    Mutant(
        "messages of another version are read",
        "if magic != MAGIC or version != VERSION:",
        "if magic != MAGIC:",
        (FIELDS,),
    ),
    Mutant(
        "what follows a message is left unread",
        "len(data) != text_start + text_bytes:",
        "len(data) < text_start + text_bytes:",
        (TRUNCATED,),
    ),
    Mutant("an op that nobody knows is let through", "if op not in _OPS:", "if op > max(_OPS):", (FIELDS,)),
    Mutant(
        "unused dims may hold anything",
        "if num_dims > MAX_DIMS or any(dims[num_dims:]):",
        "if num_dims > MAX_DIMS:",
        (FIELDS,),
    ),
    Mutant(
        "an empty tensor's other dims are not looked at",
        "math.prod(max(dim, 1) for dim in self.shape)",
        "math.prod(self.shape)",
        ("test_protocol.py::test_a_shape_whose_product_overflows_is_refused_even_when_it_is_empty",),
    ),
    Mutant("an offset need not be aligned", "if self.offset % ALIGNMENT:", "if self.offset % 8:", (SPEC,)),
    Mutant(
        "names may repeat",
        "if len({spec.name for spec in tensors}) != len(tensors):",
        "if len({spec.name for spec in tensors}) > len(tensors):",
        ("test_protocol.py::test_names_that_repeat_are_refused_on_both_sides",),
    ),
    Mutant(
        "infinities are read from the text",
        "    if not math.isfinite(value):\n        _refuse_number(text)\n    return value",
        "    return value",
        (FIELDS,),
        file="protocol.py",
    ),
    Mutant(
        "a field that nobody knows is let through",
        "if not required <= body.keys() <= names:",
        "if not required <= body.keys():",
        ("test_typed_messages.py::test_a_field_more_or_less_is_refused_by_name",),
    ),
    Mutant(
        "true is taken for the number 1",
        "    if type(value) is kind:\n",
        "    if isinstance(value, kind):\n",
        ("test_typed_messages.py::test_a_value_of_another_type_is_refused_by_name",),
    ),
    Mutant(
        "a field that was left out has no value",
        "values = defaults.copy()",
        "values: dict[str, Any] = {}",
        ("test_typed_messages.py::test_a_record_arrives_as_it_was_sent",),
    ),
    Mutant(
        "a tensor may pass the end of its segment by a byte",
        "        if end > self.num_bytes:\n",
        "        if end > self.num_bytes + 1:\n",
        ("test_channel.py::test_a_tensor_ends_inside_its_segment",),
    ),
    Mutant(
        "a tensor may lie on the control page",
        "if spec.segment == 0 and spec.offset < CONTROL_BYTES:",
        "if spec.segment == 0 and spec.offset < 64:",
        ("test_channel.py::test_the_control_page_holds_no_tensor",),
    ),
    Mutant(
        "ranks share one word for their heartbeats",
        "        word = (1 + rank) * _WORD_STRIDE\n",
        "        word = 1 * _WORD_STRIDE\n",
        ("test_channel.py::test_cancel_word_and_heartbeats_do_not_touch_each_other_or_the_tensors",),
    ),
    Mutant(
        "a segment can be shrunk under its mapping",
        "fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL",
        "fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL",
        ("test_channel.py::test_a_segment_is_private_and_cannot_shrink_grow_or_be_unsealed",),
    ),
    Mutant(
        "descriptors beside what is no message stay open",
        "        except ProtocolError:\n            _close_all(fds)\n            raise\n\n    def _packet",
        "        except ProtocolError:\n            raise\n\n    def _packet",
        ("test_channel.py::test_a_packet_that_is_no_message_is_refused_without_leaking_its_descriptors",),
    ),
)
