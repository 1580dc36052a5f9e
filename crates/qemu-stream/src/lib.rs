//! Incremental parser and writer of QEMU's migration stream and return path.
