//! Tests hostile and killed clients: only their own connections end.

use crate::client::*;
use crate::common::{MIB, Moody, NAME, Served, allocated, wait_until};
use longhaul_storage::nbd::Limits;
use std::io::Write;
use std::time::Duration;

fn still_serves(served: &Served) {
    let mut client = Client::ready(served, false);
    assert_eq!(client.write(0, 0, b"well"), 0);
    assert_eq!(client.read(0, 4).unwrap(), b"well");
}

#[test]
fn what_is_no_handshake_is_cut_off() {
    let (served, _path) = Served::image(MIB);
    for flags in [0u32, 2, 4 | 1, u32::MAX] {
        let mut client = Client::silent(&served);
        client.send(&flags.to_be_bytes());
        assert!(client.is_cut_off(), "{flags:#x}");
    }
    let mut client = Client::haggling(&served);
    client.send(b"GET / HTTP/1.1\r\n\r\n");
    assert!(client.is_cut_off());
    // The option that cannot be refused.
    let mut client = Client::haggling(&served);
    client.send_option(1, NAME.len() as u32, NAME.as_bytes());
    assert!(client.is_cut_off());
    // More data than any option needs: the server does not even wait for it.
    let mut client = Client::haggling(&served);
    client.send_option(GO, (16 << 10) + 1, b"");
    assert!(client.is_cut_off());
    let mut client = Client::haggling(&served);
    client.send_option(LIST_META, u32::MAX, b"");
    assert!(client.is_cut_off());
    served.wait_for_connections(0);
    assert_eq!(served.notices().len(), 8);
    still_serves(&served);
}

#[test]
fn options_with_lengths_that_lie_are_refused() {
    let (served, _path) = Served::image(MIB);
    let mut client = Client::haggling(&served);
    let good = info(NAME, &[3]);
    let mut name_too_long = good.clone();
    name_too_long[..4].copy_from_slice(&u32::MAX.to_be_bytes());
    let mut too_many = good.clone();
    too_many[36..38].copy_from_slice(&u16::MAX.to_be_bytes());
    let trailing = [&good[..], b"x"].concat();
    for data in [
        &good[..3],
        &good[..37],
        &good[..39],
        &name_too_long,
        &too_many,
        &trailing,
    ] {
        assert_eq!(client.option(GO, data), INVALID);
    }
    assert_eq!(client.option(GO, &info("\0", &[])), INVALID);
    let mut not_utf8 = info("ab", &[]);
    not_utf8[4] = 0xff;
    assert_eq!(client.option(GO, &not_utf8), INVALID);
    assert_eq!(client.option(GO, &info(&"n".repeat(4097), &[])), INVALID);
    assert_eq!(client.option(GO, &info(&"n".repeat(4096), &[])), UNKNOWN);

    assert_eq!(client.option(STRUCTURED_REPLY, b""), ACK);
    assert_eq!(
        client.option(SET_META, &contexts(NAME, &["base:allocation"; 33])),
        TOO_BIG
    );
    assert_eq!(
        client.option(SET_META, &contexts(NAME, &["no colon"])),
        INVALID
    );
    let mut lying = contexts(NAME, &["base:allocation"]);
    lying[43] += 1;
    assert_eq!(client.option(SET_META, &lying), INVALID);
    let mut counting = contexts(NAME, &[]);
    counting[39] = 1;
    assert_eq!(client.option(LIST_META, &counting), INVALID);
    // The client may still send a valid option.
    assert_eq!(client.option(GO, &good), ACK);
}

#[test]
fn nobody_haggles_for_ever() {
    let (served, _path) = Served::image(MIB);
    let mut client = Client::haggling(&served);
    for _ in 0..64 {
        assert_eq!(client.option(LIST, b""), POLICY);
    }
    client.send_option(LIST, 0, b"");
    assert!(client.is_cut_off());
    still_serves(&served);
}

#[test]
fn those_who_never_begin_lose_their_place() {
    let limits = Limits {
        connections: 2,
        handshake: Duration::from_secs(2),
    };
    let disk = Moody::new(4096);
    let served = Served::within(disk, tempfile::tempdir().unwrap(), limits);
    let mut ready = Client::ready(&served, false);
    let mut dribbling = Client::haggling(&served);
    let mut third = Client::silent(&served);
    assert!(third.is_cut_off(), "there were two places");
    // Sending a byte of an option occasionally does not keep the connection.
    dribbling.send_option(LIST, 16 << 10, b"");
    wait_until(|| {
        std::thread::sleep(Duration::from_millis(20));
        dribbling.stream.write_all(b"x").is_err()
    });
    served.wait_for_connections(1);
    let notices = served.notices();
    assert!(notices[1].contains("timed out"), "{notices:?}");
    // A client in transmission may be silent for any time.
    assert_eq!(ready.write(0, 0, b"still here"), 0);
    Client::ready(&served, true);
}

#[test]
fn what_is_no_request_is_cut_off() {
    let (served, path) = Served::image(MIB);
    let mut client = Client::ready(&served, false);
    client.send(&[0x55; 28]);
    assert!(client.is_cut_off());
    for length in [(32 << 20) + 1, u32::MAX] {
        let mut client = Client::ready(&served, true);
        client.request(WRITE, 0, 0, length);
        assert!(client.is_cut_off());
    }
    assert_eq!(allocated(&path), 0);
    still_serves(&served);
}

#[test]
fn a_write_that_did_not_come_whole_changes_nothing() {
    let (served, path) = Served::image(MIB);
    let mut staying = Client::ready(&served, false);
    for sent in [0, 1, 4000, 4095] {
        let mut client = Client::ready(&served, false);
        client.request(WRITE, FUA, 0, 4096);
        client.send(&vec![0xff; sent]);
        drop(client);
        served.wait_for_connections(1);
    }
    let mut client = Client::ready(&served, false);
    client.send(&request(WRITE, 0, 0, 4096)[..20]);
    drop(client);
    served.wait_for_connections(1);
    assert_eq!(allocated(&path), 0);
    assert_eq!(staying.read(0, 4096).unwrap(), [0; 4096]);
    assert_eq!(served.notices().len(), 5);
}

#[test]
fn a_client_that_does_not_take_its_answers_holds_up_nobody_else() {
    let (served, _path) = Served::image(16 * MIB);
    let mut greedy = Client::ready(&served, false);
    for _ in 0..10 {
        greedy.request(READ, 0, 0, 16 << 20);
    }
    still_serves(&served);
    drop(greedy);
    served.wait_for_connections(0);
}
