//! Tests the effects of requests and their replies.

use crate::client::*;
use crate::common::{MIB, Moody, NAME, Served, allocated};
use longhaul_storage::disk::ExportSize;
use longhaul_storage::nbd::{Export, ExportName, Limits, Server, ServerError};
use std::os::unix::net::UnixListener;
use std::time::Duration;

#[test]
fn bytes_come_back_as_they_were_written_aligned_or_not() {
    let (served, path) = Served::image(4 * MIB);
    let mut client = Client::ready(&served, false);
    let bytes: Vec<u8> = (0..MIB as usize + 77)
        .map(|i| (i * 7 % 251) as u8)
        .collect();
    assert_eq!(client.write(0, 12_345, &bytes), 0);
    // Acknowledged: it is in the file.
    let file = std::fs::read(&path).unwrap();
    assert!(file[12_345..12_345 + bytes.len()] == bytes);
    assert!(client.read(12_345, bytes.len() as u32).unwrap() == bytes);
    assert_eq!(client.read(12_344, 3).unwrap(), [0, bytes[0], bytes[1]]);
    // An empty request is valid too.
    assert!(client.read(7, 0).unwrap().is_empty());
    assert_eq!(client.write(0, 4 * MIB, b""), 0);
    for command in [TRIM, ZEROES] {
        assert_eq!(client.ask(command, 0, 4 * MIB, 0), 0);
    }
    // A write over one connection is read over another.
    let mut other = Client::ready(&served, true);
    other.request(READ, 0, 12_345, 4);
    let data = [&12_345u64.to_be_bytes()[..], &bytes[..4]].concat();
    assert_eq!(other.part(), (1, data));
    other.request(READ, 0, 5, 0);
    assert_eq!(other.part(), (0, Vec::new()));
}

#[test]
fn requests_that_come_all_at_once_are_all_answered() {
    let (served, _path) = Served::image(MIB);
    let mut client = Client::ready(&served, false);
    let mut all = Vec::new();
    for place in 0..100u64 {
        all.extend(request(WRITE, 0, place * 100, 100));
        all.extend([place as u8; 100]);
    }
    client.send(&all);
    (0..100).for_each(|_| assert_eq!(client.error(), 0));
    let read = client.read(0, 10_000).unwrap();
    assert!(
        read.iter()
            .enumerate()
            .all(|(at, byte)| usize::from(*byte) == at / 100)
    );
}

#[test]
fn the_largest_request_is_taken_and_one_byte_more_is_not() {
    let most = 32 << 20;
    let (served, path) = Served::image(u64::from(most) + 10);
    let mut client = Client::ready(&served, false);
    let bytes = vec![0x5a; most as usize];
    assert_eq!(client.write(FUA, 5, &bytes), 0);
    assert!(client.read(5, most).unwrap() == bytes);
    assert_eq!(client.read(0, most + 1), Err(EOVERFLOW));
    // Without a payload, the length is not limited.
    assert_eq!(client.ask(ZEROES, 0, 0, most + 10), 0);
    // The last block, which contains the end of the file, may stay, and blocks in which a file
    // system with scattered free space lists the extents.
    assert!(allocated(&path) <= 64 << 10);
    client.request(WRITE, 0, 0, most + 1);
    assert!(client.is_cut_off());
}

#[test]
fn what_lies_beyond_the_end_is_an_error_and_the_connection_goes_on() {
    let (served, path) = Served::image(MIB);
    for structured in [false, true] {
        let mut client = Client::ready(&served, structured);
        let mut error = |command: u16, offset: u64, length: u32| {
            client.request(command, 0, offset, length);
            if command == WRITE {
                client.send(&vec![1; length as usize]);
            }
            if !structured {
                return client.error();
            }
            let (kind, payload) = client.part();
            assert_eq!(kind, 0x8001);
            assert!(payload.len() > 6, "no reason is given");
            u32::from_be_bytes(payload[..4].try_into().unwrap())
        };
        for (offset, length) in [
            (MIB - 1, 2),
            (MIB, 1),
            (u64::MAX, 1),
            (u64::MAX - 4095, 4096),
        ] {
            assert_eq!(error(READ, offset, length), EINVAL);
            assert_eq!(error(TRIM, offset, length), EINVAL);
            assert_eq!(error(STATUS, offset, length), EINVAL);
            assert_eq!(error(WRITE, offset, length), ENOSPC);
            assert_eq!(error(ZEROES, offset, length), ENOSPC);
        }
        // Unknown commands, CACHE among them, and a query of nothing.
        for command in [5, 8, 77, 0xffff] {
            assert_eq!(error(command, 0, 1), EINVAL);
        }
        assert_eq!(error(STATUS, 0, 0), EINVAL);
        assert_eq!(error(FLUSH, 0, 1), EINVAL);
    }
    assert_eq!(allocated(&path), 0);
    assert_eq!(served.notices(), [""; 0]);
}

#[test]
fn flags_are_taken_where_they_belong() {
    let (served, path) = Served::image(4 * MIB);
    let mut client = Client::ready(&served, false);
    for (command, flags) in [
        (READ, 4), // DF is not offered.
        (READ, NO_HOLE),
        (TRIM, NO_HOLE),
        (FLUSH, REQ_ONE),
        (ZEROES, FAST_ZERO),
        (ZEROES, NO_HOLE | FAST_ZERO),
        (ZEROES, 1 << 15),
    ] {
        assert_eq!(
            client.ask(command, flags, 0, 0),
            EINVAL,
            "{command} {flags}"
        );
    }
    // The payload of a write is read, whatever its flags are.
    assert_eq!(client.write(NO_HOLE, 0, &[1; 5000]), EINVAL);
    assert_eq!(allocated(&path), 0);
    // FUA is valid for every command.
    for command in [READ, FLUSH, TRIM, ZEROES] {
        assert_eq!(client.ask(command, FUA, 0, 0), 0);
    }
    assert_eq!(client.ask(ZEROES, NO_HOLE, 0, MIB as u32), 0);
    assert!(allocated(&path) >= MIB);
    assert_eq!(client.ask(ZEROES, 0, 0, MIB as u32), 0);
    assert_eq!(allocated(&path), 0);
}

#[test]
fn holes_are_told_apart_from_data_and_a_discard_makes_one() {
    let (served, path) = Served::image(8 * MIB);
    let mut client = Client::ready(&served, true);
    let mut written = |offset: u64, bytes: &[u8]| {
        client.request(WRITE, FUA, offset, bytes.len() as u32);
        client.send(bytes);
        assert_eq!(client.part(), (0, Vec::new()));
    };
    written(2 * MIB, &[1; 2 << 20]);
    let data = MIB as u32;
    let expected = |extents: &[(u32, u32)]| {
        let extents = extents
            .iter()
            .flat_map(|(length, status)| [*length, *status]);
        let numbers: Vec<u32> = std::iter::once(1).chain(extents).collect();
        (
            5,
            numbers
                .iter()
                .flat_map(|n| n.to_be_bytes())
                .collect::<Vec<u8>>(),
        )
    };
    client.request(STATUS, 0, MIB, 4 * data);
    assert_eq!(
        client.part(),
        expected(&[(data, 3), (2 * data, 0), (data, 3)])
    );
    client.request(STATUS, REQ_ONE, MIB + 100, 4 * data);
    assert_eq!(client.part(), expected(&[(data - 100, 3)]));
    client.request(TRIM, 0, 3 * MIB, data);
    assert_eq!(client.part(), (0, Vec::new()));
    client.request(STATUS, 0, 2 * MIB, 2 * data);
    assert_eq!(client.part(), expected(&[(data, 0), (data, 3)]));
    assert!(allocated(&path) <= MIB + (64 << 10));
}

#[test]
fn an_image_that_grows_is_written_behind_its_end() {
    let (served, path) = Served::image_as(MIB, ExportSize::Bytes(64 * MIB));
    let mut client = Client::ready(&served, false);
    assert_eq!(client.read(MIB - 1, 2).unwrap(), [0, 0]);
    assert_eq!(client.write(0, 3 * MIB, b"grown"), 0);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 3 * MIB + 5);
    assert_eq!(client.read(3 * MIB, 6).unwrap(), b"grown\0");
    assert_eq!(client.write(0, 64 * MIB - 1, b"xx"), ENOSPC);
}

#[test]
fn what_is_to_be_durable_is_flushed_before_it_is_answered() {
    let disk = Moody::new(64 << 10);
    let served = Served::new(disk.clone());
    let mut client = Client::ready(&served, false);
    let flushes = || disk.get(|mood| mood.flushes);
    assert_eq!(client.write(0, 0, b"not yet"), 0);
    assert_eq!(flushes(), 0);
    assert_eq!(client.ask(FLUSH, 0, 0, 0), 0);
    assert_eq!(flushes(), 1);
    assert_eq!(client.write(FUA, 0, b"at once"), 0);
    assert_eq!(flushes(), 2);
    assert_eq!(client.ask(ZEROES, FUA, 0, 10), 0);
    assert_eq!(client.ask(TRIM, FUA, 0, 10), 0);
    assert_eq!(flushes(), 4);
    assert_eq!(client.ask(TRIM, 0, 0, 10), 0);
    assert_eq!(flushes(), 4);
}

#[test]
fn a_server_that_stops_answers_what_came_before() {
    let disk = Moody::new(64 << 10);
    let mut served = Served::new(disk.clone());
    let mut client = Client::ready(&served, false);
    let mut idle = Client::haggling(&served);
    disk.set(|mood| mood.held = true);
    client.request(WRITE, 0, 0, 5);
    client.send(b"last!");
    crate::common::wait_until(|| disk.get(|mood| mood.writes == 1));
    let again = UnixListener::bind(served.path("again")).unwrap();
    let spare = Server::start(again, Vec::new(), Limits::default(), |_| ()).unwrap();
    let server = std::mem::replace(&mut served.server, spare);
    let stopping = std::thread::spawn(move || server.stop(crate::common::PATIENCE));
    assert!(idle.is_cut_off());
    disk.set(|mood| mood.held = false);
    assert_eq!(client.error(), 0);
    assert!(client.is_cut_off());
    assert_eq!(stopping.join().unwrap(), 0);
    assert_eq!(disk.get(|mood| mood.bytes[..5].to_vec()), b"last!");
}

#[test]
fn a_server_whose_disk_does_not_answer_stops_all_the_same_and_says_so() {
    let disk = Moody::new(64 << 10);
    let mut served = Served::new(disk.clone());
    let mut client = Client::ready(&served, false);
    disk.set(|mood| mood.held = true);
    client.request(WRITE, 0, 0, 5);
    client.send(b"stuck");
    crate::common::wait_until(|| disk.get(|mood| mood.writes == 1));
    let again = UnixListener::bind(served.path("again")).unwrap();
    let spare = Server::start(again, Vec::new(), Limits::default(), |_| ()).unwrap();
    let server = std::mem::replace(&mut served.server, spare);
    assert_eq!(server.stop(Duration::from_millis(1)), 1);
    assert!(client.is_cut_off());
    disk.set(|mood| mood.held = false);
}

#[test]
fn two_disks_have_two_names() {
    let folder = tempfile::tempdir().unwrap();
    let export = || Export {
        name: ExportName::new(NAME.to_owned()).unwrap(),
        disk: Moody::new(512),
    };
    let listener = UnixListener::bind(folder.path().join("nbd")).unwrap();
    let refused = Server::start(
        listener,
        vec![export(), export()],
        Limits::default(),
        |_| (),
    );
    assert!(matches!(refused.err(), Some(ServerError::SameName)));
}

#[test]
fn a_goodbye_ends_one_connection_and_no_other() {
    let (served, _path) = Served::image(MIB);
    let mut staying = Client::ready(&served, false);
    let mut leaving = Client::ready(&served, true);
    leaving.request(DISC, 0, 0, 0);
    assert!(leaving.is_cut_off());
    served.wait_for_connections(1);
    assert_eq!(staying.write(0, 0, b"here"), 0);
    assert_eq!(served.notices(), [""; 0]);
}
