"""The documents that the tests of data read: empty, short, not ASCII, longer than a window."""

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "",
    "pipelines have bubbles",
    "naïve café, 数据",
    "a",
    "the pipeline is full of the bubbles that the fox left over " * 5,
]
END = "<end>"
