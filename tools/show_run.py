"""Shows a run: its loss curve in the terminal, and as a web page. It is `megatron-ext show`: see --help."""

from command import start

if __name__ == "__main__":
    start("show")
