//! Fuzzes the file in which a host keeps its realm, as it is or with a correct checksum: read, and
//! written again as the same; or refused.

use longhaul_network::member::Stored;

/// Reads `data` as the file, and as the file without its checksum.
pub(crate) fn run(data: &[u8]) {
    check(data);
    let sum = blake3::hash(data);
    check(&[data, sum.as_bytes()].concat());
}

fn check(bytes: &[u8]) {
    let Ok(stored) = Stored::decode(bytes) else {
        return;
    };
    let written = stored.encode().expect("what was read can be written");
    assert_eq!(Stored::decode(&written), Ok(stored));
}
