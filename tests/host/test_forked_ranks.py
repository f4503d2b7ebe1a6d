"""What forks tests' ranks, where it writes into the C library's record of a thread."""

import ctypes

from .forked_ranks import THREAD_BYTES, number_in

AT = 720  # where glibc has the number on this kind of processor


def test_the_number_of_a_thread_is_not_taken_for_half_of_an_address() -> None:
    """Process 32547 (0x7f23) wrote over half of such an address, and what it had forked was ended by SIGSEGV."""
    record = ctypes.create_string_buffer(THREAD_BYTES)
    for offset in (0, 16, AT - 8):
        ctypes.c_uint64.from_buffer(record, offset).value = 0x7F23_AEE0_0740
    ctypes.c_int.from_buffer(record, AT).value = 0x7F23
    found = number_in(ctypes.addressof(record), 0x7F23)
    assert ctypes.addressof(found) == ctypes.addressof(record) + AT
