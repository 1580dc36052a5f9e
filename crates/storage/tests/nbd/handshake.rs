//! Tests the handshake: what is agreed on and what is refused.

use crate::client::*;
use crate::common::{MIB, NAME, Served};
use longhaul_storage::nbd::ExportName;

#[test]
fn an_export_is_described_as_it_is() {
    let (served, _path) = Served::image(5 * MIB + 3);
    let mut client = Client::haggling(&served);
    let replies = client.replies(INFO, &info(NAME, &[3, 1, 3]));
    assert_eq!(replies.len(), 3);
    let mut export = vec![0, 0];
    export.extend((5 * MIB + 3).to_be_bytes());
    // Has flags, flush, FUA, trim, write zeroes, several connections.
    export.extend(0b1_0110_1101u16.to_be_bytes());
    assert_eq!(replies[0], (REP_INFO, export.clone()));
    let mut blocks = vec![0, 3];
    blocks.extend([1u32, 4096, 32 << 20].map(u32::to_be_bytes).concat());
    assert_eq!(replies[1], (REP_INFO, blocks));
    assert_eq!(replies[2], (ACK, Vec::new()));
    // Without a request for information, it sends the minimum.
    let replies = client.replies(GO, &info(NAME, &[]));
    assert_eq!(replies, [(REP_INFO, export), (ACK, Vec::new())]);
    assert_eq!(client.read(5 * MIB, 3).unwrap(), [0; 3]);
}

#[test]
fn names_are_neither_listed_nor_guessed() {
    let (served, _path) = Served::image(MIB);
    let mut client = Client::haggling(&served);
    assert_eq!(client.option(LIST, b""), POLICY);
    assert_eq!(client.option(LIST, b"x"), INVALID);
    for name in ["", &NAME[1..], &NAME.to_uppercase()] {
        assert_eq!(client.option(GO, &info(name, &[])), UNKNOWN);
        assert_eq!(client.option(INFO, &info(name, &[3])), UNKNOWN);
    }
    // The client may still send a valid option.
    assert_eq!(client.option(GO, &info(NAME, &[])), ACK);

    for name in [
        "",
        "short",
        &"a".repeat(257),
        &format!("{NAME}/"),
        &format!("{NAME}\n"),
    ] {
        assert!(ExportName::new(name.to_owned()).is_none(), "{name:?}");
    }
    let name = ExportName::new(NAME.to_owned()).unwrap();
    assert!(!format!("{name:?}").contains(NAME));
}

#[test]
fn allocation_is_told_to_those_who_asked_for_it() {
    let (served, _path) = Served::image(MIB);
    let all = contexts(NAME, &[]);
    let allocation = contexts(NAME, &["x-other:thing", "base:allocation"]);
    let mut client = Client::haggling(&served);
    // Only with structured replies.
    assert_eq!(client.option(SET_META, &allocation), INVALID);
    assert_eq!(client.option(STRUCTURED_REPLY, b"x"), INVALID);
    assert_eq!(client.option(STRUCTURED_REPLY, b""), ACK);
    let context = |id: u32| {
        (
            REP_META,
            [&id.to_be_bytes()[..], b"base:allocation"].concat(),
        )
    };
    for query in [all.clone(), contexts(NAME, &["base:"])] {
        let replies = client.replies(LIST_META, &query);
        assert_eq!(replies, [context(0), (ACK, Vec::new())]);
    }
    assert_eq!(
        client
            .replies(LIST_META, &contexts(NAME, &["base:other"]))
            .len(),
        1
    );
    for nothing in [all, contexts(NAME, &["base:"])] {
        assert_eq!(client.replies(SET_META, &nothing), [(ACK, Vec::new())]);
    }
    assert_eq!(
        client.replies(SET_META, &allocation),
        [context(1), (ACK, Vec::new())]
    );
    assert_eq!(
        client.option(SET_META, &contexts("other", &["base:allocation"])),
        UNKNOWN
    );
    // The failed choice has replaced the previous one.
    assert_eq!(client.option(GO, &info(NAME, &[])), ACK);
    client.request(STATUS, 0, 0, 4096);
    assert_eq!(client.part().0, 0x8001);
}

#[test]
fn options_that_are_not_offered_are_refused_and_skipped() {
    let (served, _path) = Served::image(MIB);
    let mut client = Client::haggling(&served);
    // STARTTLS, EXTENDED_HEADERS, and an unknown one.
    for option in [5, 11, 0xffff_fff0] {
        assert_eq!(client.option(option, b"something"), UNSUP);
    }
    assert_eq!(client.option(ABORT, b"ignored"), ACK);
    assert!(client.is_cut_off());
    // Disconnecting without waiting for the reply is valid too.
    let mut client = Client::haggling(&served);
    client.send_option(ABORT, 0, b"");
    drop(client);
    served.wait_for_connections(0);
    assert_eq!(served.notices(), [""; 0]);
}
