"""A run in the forms that other tools read: Chrome's trace events, Perfetto's protobuf."""
