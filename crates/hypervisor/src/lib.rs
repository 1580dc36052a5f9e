//! QEMU from outside: QMP, launching guests, their memory and their migration sockets.

pub mod qmp;
