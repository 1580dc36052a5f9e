//! The one replication engine: source, destination, strategies, stop point and hand-over.
