"""A worker's module that starts a thread when it is imported, as it must not."""

import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()
