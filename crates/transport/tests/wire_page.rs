//! Tests that the code matches the examples and limits of `docs/wire.md`, sections 1 to 3.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use longhaul_protocol::limits::{CONTROL_MESSAGE_BYTES_MAX, FRAME_BYTES_MAX};
use longhaul_protocol::{Attempt, AttemptId, Epoch, MigrationId};
use longhaul_transport::*;

const PAGE: &str = include_str!("../../../docs/wire.md");

/// Returns the bytes of the example that follows the line.
fn example(line: &str) -> Vec<u8> {
    let (_, rest) = PAGE.split_once(line).unwrap_or_else(|| panic!("{line}"));
    let block = rest.split("```").nth(1).unwrap();
    let bytes = block.split_whitespace();
    bytes.map(|b| u8::from_str_radix(b, 16).unwrap()).collect()
}

fn binding() -> BulkBinding {
    BulkBinding {
        attempt: AttemptId {
            migration: MigrationId([0xa0, 0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7]),
            attempt: Attempt(1),
        },
        epoch: Epoch(515),
    }
}

#[test]
fn the_hello() {
    let hello = Hello {
        version_min: 1,
        version_max: 2,
        software: "longhaul 0.1.0".to_owned(),
        incarnation: None,
    };
    let bytes = example("Example: versions 1 to 2");
    assert_eq!(hello.encode(), bytes);
    assert_eq!(Hello::decode_head(bytes.first_chunk().unwrap()), Ok(19));
    assert_eq!(Hello::decode_body(&bytes[10..]), Ok(hello));
}

#[test]
fn the_opening_and_the_header_of_a_stream() {
    let opening = BulkOpening {
        purpose: BulkPurpose::Migration,
        streams: 16,
        token: BulkToken::from_bytes([0x55; 32]),
        binding: binding(),
    };
    let bytes = example("Example: a migration `a0a1a2a3a4a5a6a7`");
    assert_eq!(BulkOpening::decode(&bytes), Ok(opening));
    let header = StreamHeader {
        kind: StreamKind::Frames,
        binding: binding(),
    };
    let bytes = example("Example: the header of a stream of frames");
    assert_eq!(StreamHeader::decode(&bytes), Ok(header));
}

#[test]
fn a_question_for_this_hosts_address_and_its_answer() {
    let request = BindingRequest {
        transaction: *b"\xb7\xe7\xa7\x01\xbc\x34\xd6\x86\xfa\x87\xdf\xae",
        fingerprint: true,
        unknown: Vec::new(),
    };
    let bytes = example("Example: a request with a FINGERPRINT");
    assert_eq!(request.encode(), bytes);
    let answer = binding_answer(&bytes, "[::ffff:192.0.2.1]:32853".parse().unwrap());
    assert_eq!(answer, Some(example("The answer to 192.0.2.1, port 32853")));
}

#[test]
fn the_limits() {
    for text in [
        format!("at most {STUN_BYTES_MAX} bytes and 16 attributes"),
        format!("An answer has at most {STUN_ANSWER_BYTES_MAX} bytes"),
        format!("A message has at most\n{CONTROL_MESSAGE_BYTES_MAX} bytes"),
        format!("of at most {FRAME_BYTES_MAX} bytes"),
        format!("acknowledgements of at most {ACKNOWLEDGEMENT_BYTES_MAX}"),
        format!("at most {CHANNELS_MAX} at once"),
        format!("then refused) | {HANDSHAKES_MAX} |"),
        format!("with one peer at once | {CONNECTIONS_PER_PEER_MAX} |"),
        format!("{MESSAGES_BYTES_PER_PEER_MAX} bytes of unfinished messages"),
        format!("1 to {BULK_STREAMS_MAX} |"),
        format!("for at most {} s", PROBE_TIME_MAX.as_secs()),
        format!("bytes that follow, at most {HELLO_BODY_BYTES_MAX} |"),
    ] {
        assert!(PAGE.contains(&text), "{text}");
    }
}
