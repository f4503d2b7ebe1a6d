"""Mistakes that no test can tell from the code as it is: the operator, the line, the mistaken line, and the reason."""

from __future__ import annotations

EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "axis swapped",
        "if mask is not None and self._patch is None and mask.shape[2] == 1: # may be made from this rank's tokens",
        "if mask is not None and self._patch is None and mask.shape[1] == 1: # may be made from this rank's tokens",
    ): "no class has a mask of its own for each head; one with a row for each query would be kept and never read",
    (
        "lengths taken as equal",
        "is_whole = run.held or run.stream in call.uncut or not sum(lengths)",
        "is_whole = run.held or run.stream in call.uncut or not (lengths[0] * len(lengths))",
    ): "a stream of fewer tokens than parts is uncut, so each part has a token or none has",
    (
        "lengths taken as equal",
        "self.traffic.add((send.shape[0] - send_lengths[self.index]) * row_bytes)",
        "self.traffic.add((send.shape[0] - send_lengths[0]) * row_bytes)",
    ): "an axis to nobody has the place 0",
    (
        "arithmetic",
        "apart_s = [before.elapsed_time(after) / 1000 for before, after in pairwise([*self._events, now])]",
        "apart_s = [(before.elapsed_time(after) * 1000) for before, after in pairwise([*self._events, now])]",
    ): "the unit of the device's clock goes with the rate, by which each part is multiplied",
    (
        "axis swapped",
        "k, v = (torch.cat(each, 2) if each[0].shape[2] else each[1] for each in zip(common, others, strict=True))",
        "k, v = (torch.cat(each, 2) if each[0].shape[1] else each[1] for each in zip(common, others, strict=True))",
    ): "a tensor without tokens put before others changes no value; the condition saves a copy",
    (
        "axis swapped",
        "axis.all_to_all(self._x.new_empty((0, shape[2])), send_lengths=nothing, receive_lengths=nothing)",
        "axis.all_to_all(self._x.new_empty((0, shape[1])), send_lengths=nothing, receive_lengths=nothing)",
    ): "no row is sent or received, of whatever width",
    (
        "constant off by one",
        "os.eventfd_write(self._answered, 1)",
        "os.eventfd_write(self._answered, 2)",
    ): "any number wakes the thread that answers, which reads all that was added",
}
