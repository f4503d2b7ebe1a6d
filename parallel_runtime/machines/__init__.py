"""Workers on further machines: which of them join, how each proves itself, and how its ranks start and end.

ComfyUI's side has a `MachineServer` (server.py); each further machine runs `python -m parallel_runtime join` (join.py).
One authenticated control connection a machine carries what messages.py has. Tensors never travel on it.
"""
