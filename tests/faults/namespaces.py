"""Namespaces of the kernel, in which a test may mount a small disk or be a machine with another name and address.

Root has them everywhere but in a container that takes the right away; others have them where the kernel lets users make
their own. Where there are none, a test goes on with what it can inject without, and pytest's summary says so.
"""

import subprocess
import warnings

OWN_USER = ("--user", "--map-root-user")


def namespaces(*kinds: str) -> list[str]:
    """The command that runs another in namespaces such as "--mount"; nothing, with a warning, where that is refused."""
    for more in ((), OWN_USER):
        command = ["unshare", *more, *kinds]
        try:
            done = subprocess.run([*command, "true"], capture_output=True, check=False)
        except FileNotFoundError:
            break
        if done.returncode == 0:
            return command
    warnings.warn(f"this machine has no namespaces {kinds}: injected as far as it goes without them", stacklevel=2)
    return []
