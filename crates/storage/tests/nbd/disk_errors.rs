//! Tests a failing disk: its client gets an error, and no other client is affected.

use crate::client::*;
use crate::common::{Moody, Served};
use nix::errno::Errno;

#[test]
fn errors_of_the_disk_reach_the_client_with_their_errno() {
    let disk = Moody::new(64 << 10);
    let served = Served::new(disk.clone());
    let mut client = Client::ready(&served, false);
    for (errno, told) in [
        (Errno::EIO, EIO),
        (Errno::ENOSPC, ENOSPC),
        (Errno::EDQUOT, ENOSPC),
        (Errno::EFBIG, ENOSPC),
        (Errno::EROFS, 1),
        (Errno::ENOMEM, 12),
        (Errno::ESTALE, EIO),
        (Errno::EREMOTEIO, EIO),
    ] {
        disk.set(|mood| mood.errno = Some(errno as i32));
        assert_eq!(client.read(4096, 512), Err(told));
        assert_eq!(client.write(0, 4096, b"x"), told);
        assert_eq!(client.ask(FLUSH, 0, 0, 0), told);
        assert_eq!(client.ask(TRIM, 0, 0, 512), told);
        assert_eq!(client.ask(ZEROES, 0, 0, 512), told);
    }
    disk.set(|mood| mood.errno = None);
    assert_eq!(client.write(0, 0, b"well again"), 0);
    // The owner of the server learns which bytes failed.
    let notices = served.notices();
    assert_eq!(notices.len(), 8 * 5);
    assert!(
        notices[0].starts_with("disk 0: cannot read 512 bytes at 4096: "),
        "{}",
        notices[0]
    );
}

#[test]
fn a_write_that_cannot_be_made_durable_is_not_acknowledged() {
    let disk = Moody::new(64 << 10);
    disk.set(|mood| mood.flush_errno = Some(Errno::EIO as i32));
    let served = Served::new(disk.clone());
    let mut client = Client::ready(&served, false);
    assert_eq!(client.write(0, 0, b"volatile"), 0);
    assert_eq!(client.write(FUA, 0, b"durable"), EIO);
    assert_eq!(client.ask(FLUSH, 0, 0, 0), EIO);
}

#[test]
fn structured_errors_say_in_words_what_failed() {
    let disk = Moody::new(64 << 10);
    disk.set(|mood| mood.errno = Some(Errno::ESTALE as i32));
    let served = Served::new(disk);
    let mut client = Client::ready(&served, true);
    client.request(READ, 0, 1000, 24);
    let (kind, payload) = client.part();
    assert_eq!(kind, 0x8001);
    assert_eq!(payload[..4], EIO.to_be_bytes());
    let words = String::from_utf8(payload[6..].to_vec()).unwrap();
    assert!(
        words.starts_with("cannot read 24 bytes at 1000: Stale file handle"),
        "{words}"
    );
    client.request(STATUS, 0, 0, 512);
    assert_eq!(client.part().0, 0x8001);
}
