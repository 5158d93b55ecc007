"""Writes a run's last numbers as Prometheus reads them. It is `megatron-ext prometheus`: see --help."""

from command import start

if __name__ == "__main__":
    start("prometheus")
