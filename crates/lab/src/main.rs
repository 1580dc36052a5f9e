//! The laboratory: emulated hosts, links and guests on one machine; demo, end-to-end tests, benches.

fn main() {}
