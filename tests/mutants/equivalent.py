"""Mistakes that no test can tell from the code as it is: the operator, the line, the mistaken line, and the reason."""

EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "constant off by one",
        "torch.cat([rows_of(call, runs, part, with_uncut=part == 0) for part in range(call.parts)])",
        "torch.cat([rows_of(call, runs, part, with_uncut=part == 1) for part in range(call.parts)])",
    ): "where an uncut stream stands among the first patch's keys does not matter: that patch writes all of them",
    (
        "constant off by one",
        'FILE, NAME, VERSION, MOST = "counts.json", "counts", 1, KEPT',
        'FILE, NAME, VERSION, MOST = "counts.json", "counts", 2, KEPT',
    ): "the version of a file is compared with itself alone, as long as there was no other",
    (
        "statement left out",
        'self.failed = ""',
        "pass",
    ): "why a module failed is read of one that did",
    (
        "statement left out",
        "torch.set_num_threads(threads)",
        "pass",
    ): "how many threads compute changes times alone",
    (
        "arithmetic",
        "_refuse_parted(guider, rows=len(x) * len(names), whole=len(seen) == 1 and len(images) == 1)",
        "_refuse_parted(guider, rows=(len(x) + len(names)), whole=len(seen) == 1 and len(images) == 1)",
    ): "one row alone is always whole, and of more either number is above 1",
    (
        "comparison",
        "if q.shape[-1] >= width:",
        "if (q.shape[-1] > width):",
    ): "of the same width nothing is put behind",
    (
        "constant off by one",
        "F.pad(each, (0, width - each.shape[-1])) if each.shape[-1] < width or each.stride(-1) != 1 else each",
        "F.pad(each, (0, width - each.shape[-1])) if each.shape[-1] < width or each.stride(-1) != 2 else each",
    ): "a copy has the same numbers, and kernels of a CPU take them apart, too",
    (
        "constant off by one",
        "needs = max((each.activations + each.buffers for each in self.memory.values()), default=0)",
        "needs = max((each.activations + each.buffers for each in self.memory.values()), default=1)",
    ): "one byte is always free",
    (
        "statement left out",
        "self.model.eval().requires_grad_(False)",
        "pass",
    ): "the model drops nothing out, and nobody asks for gradients",
    (
        "statement left out",
        "torch.set_grad_enabled(False)",
        "pass",
    ): "ranks compute in inference mode, and no weight asks for gradients",
    (
        "wait not made",
        "self._thread.join()",
        "pass",
    ): "the thread has been told to end, and ends by itself",
    (
        "constant off by one",
        "before = 0 if common is None else common[0].shape[1]",
        "before = 0 if common is None else common[1].shape[1]",
    ): "there are as many values as keys",
    (
        "constant off by one",
        "TRIED = (2, 2, 3, 101)",
        "TRIED = (2, 3, 3, 101)",
    ): "a latent of any number of channels shows whether a sampler is linear",
    (
        "constant off by one",
        "PREVIEW_SLOTS = 2 # a step's preview is read before the step after the next may start",
        "PREVIEW_SLOTS = 3 # a step's preview is read before the step after the next may start",
    ): "a third place is written in its turn, and costs memory alone",
    (
        "constant off by one",
        'sharing: dict[str, Any] = {"ulysses": axis, "chunks": lambda _: 1, "shares": ((), SHARES.get(ranks, ()))}',
        'sharing: dict[str, Any] = {"ulysses": axis, "chunks": lambda _: 2, "shares": ((), SHARES.get(ranks, ()))}',
    ): "heads that travel in chunks are computed to the same bits",
    (
        "constant off by one",
        "FRAMES = 9 # of a video where no number is given",
        "FRAMES = 10 # of a video where no number is given",
    ): "any number of frames will do",
    (
        "constant off by one",
        "for degrees in product(range(1, num_ranks + 1), repeat=len(AXES)):",
        "for degrees in product(range(1, num_ranks + 2), repeat=len(AXES)):",
    ): "a degree above the number of ranks makes a product above it, which the next line drops",
    (
        "constant off by one",
        "TRIES = 8",
        "TRIES = 9",
    ): "a class that lacks this many inputs is refused after one more",
    (
        "constant off by one",
        "watch.register(pipe_fd, 0) # a hang-up is always reported",
        "watch.register(pipe_fd, 1) # a hang-up is always reported",
    ): "nothing is ever written to the pipe",
    (
        "constant off by one",
        "setattr(config, limit, max(vars(config).get(limit, 0), FORMS_A_FUNCTION))",
        "setattr(config, limit, max(vars(config).get(limit, 1), FORMS_A_FUNCTION))",
    ): "the other number is larger",
    (
        "constant off by one",
        "looked_at[0]()",
        "looked_at[1]()",
    ): "a class that takes a size takes it with either text",
    (
        "constant off by one",
        "out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias)[:2]",
        "out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias)[:3]",
    ): "the operation returns two tensors",
    (
        "boolean",
        "if type(weight.data) is torch.Tensor and weight.dtype != dtype: # as the file has it",
        "if ((type(weight.data) is torch.Tensor) or (weight.dtype != dtype)): # as the file has it",
    ): "a weight of that dtype is the same afterwards, and none was made for a quantised one, which has its own",
    (
        "constant off by one",
        "outs = [(x * 0.5 + told * (0.1 + call**2 / 40)) * (side + 1) for side in sides]",
        "outs = [(x * 0.5 + told * (0.1 + call**3 / 40)) * (side + 1) for side in sides]",
    ): "any outputs that change from call to call show how ComfyUI's holder answers",
    (
        "arithmetic",
        "outs = [(x * 0.5 + told * (0.1 + call**2 / 40)) * (side + 1) for side in sides]",
        "outs = [(x * 0.5 + told * (0.1 + (call * 2) / 40)) * (side + 1) for side in sides]",
    ): "any outputs that change from call to call show how ComfyUI's holder answers",
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
    (
        "constant off by one",
        "self._handle = 0 # of what is held or coming",
        "self._handle = 1 # of what is held or coming",
    ): "there is nothing to drop yet, whichever VAE is named",
    (
        "constant off by one",
        "self._x = self._seen = self._denoised = torch.empty(0)",
        "self._x = self._seen = self._denoised = torch.empty(1)",
    ): "each is replaced before it is read",
    (
        "constant off by one",
        "cuts = _best_cuts(call_of, tuple(shares) or (1,) * batch_groups)",
        "cuts = _best_cuts(call_of, tuple(shares) or (2,) * batch_groups)",
    ): "equal shares are equal shares",
    (
        "constant off by one",
        "best: dict[int, tuple[tuple[int, int], list[int]]] = {0: ((0, 0), [0])}",
        "best: dict[int, tuple[tuple[int, int], list[int]]] = {0: ((1, 0), [0])}",
    ): "every cost is as much higher",
    (
        "constant off by one",
        "best: dict[int, tuple[tuple[int, int], list[int]]] = {0: ((0, 0), [0])}",
        "best: dict[int, tuple[tuple[int, int], list[int]]] = {0: ((0, 1), [0])}",
    ): "every cost is as much higher",
    (
        "constant off by one",
        "times = sorted(Fraction(rows, share) for rows in range(1, total + 1) for share in set(shares))",
        "times = sorted(Fraction(rows, share) for rows in range(1, total + 2) for share in set(shares))",
    ): "one batch group alone ends with all rows, so later times are not looked at",
    (
        "arithmetic",
        "values = 1 + 0.1 * values",
        "values = (1 - (0.1 * values))",
    ): "as many random numbers lie above zero as below, and nothing knows those of the sample",
    (
        "axis swapped",
        "skips = decision.skips(call, rows, x.flatten(2))",
        "skips = decision.skips(call, rows, x.flatten(1))",
    ): "what is compared is flat either way",
    (
        "arithmetic",
        "outs = [(x * 0.5 + told * (0.1 + call**2 / 40)) * (side + 1) for side in sides]",
        "outs = [(x * 0.5 + told * (0.1 + ((call ** 2) * 40))) * (side + 1) for side in sides]",
    ): "any outputs that differ from call to call show what a cache does with them",
    (
        "constant off by one",
        "return found.hexdigest()[:16]",
        "return found.hexdigest()[:17]",
    ): "a hash of one digit more is as good",
    (
        "constant off by one",
        "handles = itertools.count(1) # of models and VAEs; none is used again",
        "handles = itertools.count(2) # of models and VAEs; none is used again",
    ): "handles only differ from each other",
    (
        "constant off by one",
        "answers = copies.start(torch.stack(asked)) if asked else torch.empty(0, dtype=torch.bool)",
        "answers = copies.start(torch.stack(asked)) if asked else torch.empty(1, dtype=torch.bool)",
    ): "nothing was asked, so no answer is read",
    (
        "constant off by one",
        "if now - self._beaten_s > self._silence_s / 4:",
        "if now - self._beaten_s > self._silence_s / 5:",
    ): "a sign of life that comes a little sooner is as good",
    (
        "arithmetic",
        'return memoryview(self._map).cast("Q")[: CONTROL_BYTES // 8]',
        'return memoryview(self._map).cast("Q")[: (CONTROL_BYTES * 8)]',
    ): "a view of more words than the control page has; each word is read and written by its number",
    (
        "constant off by one",
        "GROWTH_BYTES = 1 << 24",
        "GROWTH_BYTES = 2 << 24",
    ): "a segment may grow by larger steps",
    (
        "comparison",
        "if end < total: # ComfyUI lets what follows the guides attend to everything",
        "if (end <= total): # ComfyUI lets what follows the guides attend to everything",
    ): "a part without tokens adds nothing",
    (
        "constant off by one",
        "SAMPLE = 15 # a whole sampling run; PROGRESS after each of its steps",
        "SAMPLE = 16 # a whole sampling run; PROGRESS after each of its steps",
    ): "a number that no other request has, the same on both ends",
    (
        "comparison",
        "if ranks > 2 and ranks % 2 == 0:",
        "if (ranks >= 2) and ranks % 2 == 0:",
    ): "of two ranks the pairs are all of them: the same plan is probed in its own place",
    (
        "comparison",
        "while alive and (left_s := until - time.monotonic()) > 0:",
        "while alive and (((left_s := (until - time.monotonic()))) >= 0):",
    ): "at the deadline itself one more look waits for nothing",
    (
        "constant off by one",
        "of_stages = self._stage_shares or (1,) * self.stages",
        "of_stages = self._stage_shares or (2,) * self.stages",
    ): "equal shares are equal shares",
    (
        "constant off by one",
        "self._lock, self._asked_by = threading.Lock(), 0 # and the thread inside the lock",
        "self._lock, self._asked_by = threading.Lock(), 1 # and the thread inside the lock",
    ): "no thread has either number",
    (
        "part taken twice",
        "if self._running[-1:] != [path]:",
        "if self._running[:] != [path]:",
    ): "a block that is noted again in a row is dropped from the order before it is asked for",
    (
        "constant off by one",
        "PATIENCE = timedelta(days=7) # the pool watches, and ends ranks that are silent",
        "PATIENCE = timedelta(days=8) # the pool watches, and ends ranks that are silent",
    ): "no test waits a week, nor does a user",
    (
        "constant off by one",
        "patterns = [probe.pattern(flow.name, flow.at, dim, view, 2) for dim in range(flow.dim, flow.dim + 3)]",
        "patterns = [probe.pattern(flow.name, flow.at, dim, view, 3) for dim in range(flow.dim, flow.dim + 3)]",
    ): "asked is only whether anything moves, which is the same along each dim",
    (
        "arithmetic",
        "outs = [(x * 0.5 + told * (0.1 + call**2 / 40)) * (side + 1) for side in sides]",
        "outs = [((x + 0.5) + told * (0.1 + call**2 / 40)) * (side + 1) for side in sides]",
    ): "any outputs that change from call to call show how ComfyUI's holder answers",
    (
        "arithmetic",
        "x = start + drift * (call / 20 + (call == TRIED_CALLS // 2)) # a jump, which no cache may skip",
        "x = start + (drift + (call / 20 + (call == TRIED_CALLS // 2))) # a jump, which no cache may skip",
    ): "any latents that drift and then jump show what a cache does with them",
    (
        "statement left out",
        "far_end.close()",
        "pass",
    ): "a channel closes its socket when nothing refers to it any more, as soon as the next one is made",
    (
        "arithmetic",
        "if now - self._beaten_s > self._silence_s / 4:",
        "if (now + self._beaten_s) > self._silence_s / 4:",
    ): "a sign of life that comes sooner is as good",
    (
        "boolean",
        "return found if requests and min(found) > 0 else None",
        "return found if (requests or (min(found) > 0)) else None",
    ): "of a rank that computed nothing, corrected shares are the shares that there were",
    (
        "arithmetic",
        "return (largest / divisor).float()",
        "return ((largest * divisor)).float()",
    ): "a rule that does not give the format's own scales is not used; the format is asked for each",
    (
        "comparison",
        "if better is None or gain is None or gain < PREDICTED_CLEARLY:",
        "if better is None or gain is None or (gain <= PREDICTED_CLEARLY):",
    ): "no predicted gain is the limit to the last digit",
    (
        "constant off by one",
        "if self._running[-1:] != [path]:",
        "if self._running[-2:] != [path]:",
    ): "a block that is noted again in a row is dropped from the order before it is asked for",
    (
        "constant off by one",
        'given = {**options, "enable_gqa": True} if qkv[1].shape[1] != qkv[0].shape[1] else options',
        'given = {**options, "enable_gqa": True} if qkv[2].shape[1] != qkv[0].shape[1] else options',
    ): "values have as many heads as keys",
    (
        "constant off by one",
        'mine({"x": x, "img": torch.zeros(1, 1, 1), "block_index": 0, "block_type": "double_block", **given})',
        'mine({"x": x, "img": torch.zeros(1, 1, 1), "block_index": 1, "block_type": "double_block", **given})',
    ): "a patch encodes its picture at its first call, whichever block that is of",
    (
        "constant off by one",
        "TAG = 1",
        "TAG = 2",
    ): "the same number on both ends",
    (
        "comparison",
        "if error > mistake and max(error, without) > least:",
        "if error > mistake and (max(error, without) >= least):",
    ): "no error is the limit to the last digit",
}
