"""Eight CPU devices for every test, a compilation cache for all its processes, and Ctrl-C as on a terminal."""

from __future__ import annotations

import os
import signal
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", os.environ.get("TLM_TEST_CACHE", os.path.join(tempfile.gettempdir(), "tlm_test_cache"))
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
# As `parallel.devices` does for a command; tests start jax by themselves.
os.environ.setdefault("NPROC", "32")

# A shell starts what it runs in the background with Ctrl-C ignored, which every process down to a test's inherits.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # likewise, under `nohup`
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import jax

jax.config.update("jax_num_cpu_devices", 8)
