//! Tests misbehaving peers: each is cut off with a reason, and the endpoint goes on.

use super::*;
use crate::bulk::{BulkBinding, BulkOpening, BulkPurpose, BulkToken, StreamHeader, StreamKind};
use crate::tls::ALPN_BULK;
use crate::trust::{Scope, TRUST_FILE};
use crate::{BulkError, BulkReceiver, CHANNELS_MAX, ChannelError};
use longhaul_protocol::limits::{CONTROL_MESSAGE_BYTES_MAX, FRAME_BYTES_MAX};
use longhaul_protocol::{Attempt, AttemptId, Epoch, MigrationId};

pub(crate) const LONG: Duration = Duration::from_secs(30);

pub(crate) struct Host {
    pub(crate) endpoint: Endpoint,
    _folder: tempfile::TempDir,
}

pub(crate) fn host(handshake_timeout: Duration) -> Host {
    let folder = tempfile::tempdir().unwrap();
    let hello = Hello {
        version_min: 1,
        version_max: 1,
        software: "test".to_owned(),
        incarnation: None,
    };
    let mut config = EndpointConfig::new("127.0.0.1:0".parse().unwrap(), hello);
    config.handshake_timeout = handshake_timeout;
    let identity = Identity::load_or_create(folder.path()).unwrap();
    let trust = TrustStore::open(&folder.path().join(TRUST_FILE)).unwrap();
    Host {
        endpoint: Endpoint::bind(config, identity, trust).unwrap(),
        _folder: folder,
    }
}

pub(crate) fn trust(here: &Host, name: &str, there: &Host) {
    let entry = TrustedHost {
        name: name.to_owned(),
        id: there.endpoint.host_id(),
        addresses: vec![there.endpoint.local_address().unwrap().to_string()],
        scope: Scope {
            may_query: true,
            may_send_guests: true,
        },
    };
    here.endpoint.trust().add(entry).unwrap();
}

pub(crate) fn pair(handshake_timeout: Duration) -> (Host, Host) {
    let (bad, good) = (host(LONG), host(handshake_timeout));
    trust(&bad, "good", &good);
    trust(&good, "bad", &bad);
    (bad, good)
}

/// Returns a connection before its first message.
async fn dial(bad: &Host, good: &Host, alpn: &'static [u8]) -> Link {
    let dial = Dial {
        expected: Some(good.endpoint.host_id()),
        name: "good".to_owned(),
        alpn,
        limit: RateLimit::default(),
        paths: Vec::new(),
    };
    let address = good.endpoint.local_address().unwrap();
    bad.endpoint.inner.dial(&dial, address).await.unwrap()
}

async fn code_of_end(link: &Link) -> CloseCode {
    match tokio::time::timeout(LONG, link.closed()).await.unwrap() {
        LinkError::ClosedByPeer { code, reason } => {
            assert!(!reason.is_empty());
            code
        }
        error => panic!("{error}"),
    }
}

pub(crate) async fn still_works(bad: &Host, good: &Host) {
    let (here, there) = tokio::join!(bad.endpoint.connect("good"), good.endpoint.accept());
    assert!(here.is_ok() && there.is_some());
}

fn binding() -> BulkBinding {
    BulkBinding {
        attempt: AttemptId {
            migration: MigrationId([1; 8]),
            attempt: Attempt(1),
        },
        epoch: Epoch(1),
    }
}

/// Returns a bulk connection with an accepted opening and without streams.
async fn open_bulk(bad: &Host, good: &Host, streams: u8) -> (Link, BulkReceiver) {
    let offers = &good.endpoint.inner.bulk_offers;
    let offer = offers.offer(bad.endpoint.host_id(), binding(), LONG);
    let offer = offer.unwrap();
    let opening = BulkOpening {
        purpose: BulkPurpose::Migration,
        streams,
        token: offer.token().clone(),
        binding: binding(),
    };
    let link = dial(bad, good, ALPN_BULK).await;
    let (mut send, _receive) = link.connection.open_bi().await.unwrap();
    send.write_all(&opening.encode()).await.unwrap();
    (link, offer.accept().await.unwrap())
}

#[tokio::test]
async fn garbage_for_a_hello_ends_the_connection() {
    let (bad, good) = pair(LONG);
    for bytes in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        b"LONGHAUL\xff\xff",
        b"LONGHAUL\x02\0ab",
        b"LONGHAUL\x05\0\x02\0\x01\0\0",
        b"LONGHAUL\x05\0\x01\0\x01\0\0 and more",
    ] {
        let link = dial(&bad, &good, ALPN_CONTROL).await;
        let (mut send, _receive) = link.connection.open_bi().await.unwrap();
        send.write_all(bytes).await.unwrap();
        send.finish().unwrap();
        assert_eq!(code_of_end(&link).await, CloseCode::BadOpening);
    }
    still_works(&bad, &good).await;
}

#[tokio::test]
async fn a_silent_peer_is_not_waited_for() {
    let (bad, good) = pair(Duration::from_millis(300));
    let nothing = dial(&bad, &good, ALPN_CONTROL).await;
    let nothing_bulk = dial(&bad, &good, ALPN_BULK).await;
    let half = dial(&bad, &good, ALPN_CONTROL).await;
    let (mut send, _receive) = half.connection.open_bi().await.unwrap();
    send.write_all(b"LONG").await.unwrap();
    for link in [nothing, nothing_bulk, half] {
        assert_eq!(code_of_end(&link).await, CloseCode::BadOpening);
    }
    still_works(&bad, &good).await;
}

#[tokio::test]
async fn before_the_hello_a_peer_gets_one_stream_and_a_small_window() {
    let (bad, good) = pair(Duration::from_secs(2));
    let link = dial(&bad, &good, ALPN_CONTROL).await;
    let (mut send, _receive) = link.connection.open_bi().await.unwrap();
    // Neither a second stream, nor a one-way stream, nor more than the window.
    tokio::select! {
        opened = link.connection.open_bi() => assert!(opened.is_err()),
        opened = link.connection.open_uni() => assert!(opened.is_err()),
        _ = send.write_all(&[0; 2 * OPENING_WINDOW_BYTES as usize]) => {
            assert!(link.lost().is_some());
        }
        code = code_of_end(&link) => assert_eq!(code, CloseCode::BadOpening),
    }
}

#[tokio::test]
async fn a_message_over_the_limit_ends_the_connection() {
    let (bad, good) = pair(LONG);
    let (here, there) = tokio::join!(bad.endpoint.connect("good"), good.endpoint.accept());
    let (here, there) = (here.unwrap(), there.unwrap());
    let (mut send, _receive) = here.link.connection.open_bi().await.unwrap();
    let prefix = (CONTROL_MESSAGE_BYTES_MAX as u32 + 1).to_le_bytes();
    send.write_all(&prefix).await.unwrap();
    let received = there.accept().await.unwrap().recv().await;
    assert!(matches!(received, Err(ChannelError::TooLarge { .. })));
    assert_eq!(code_of_end(&here.link).await, CloseCode::Violation);
}

#[tokio::test]
async fn a_channel_that_ends_inside_a_message_is_an_error() {
    let (bad, good) = pair(LONG);
    let (here, there) = tokio::join!(bad.endpoint.connect("good"), good.endpoint.accept());
    let (here, there) = (here.unwrap(), there.unwrap());
    let (mut send, _receive) = here.link.connection.open_bi().await.unwrap();
    send.write_all(b"\x05\0\0\0abc").await.unwrap();
    send.finish().unwrap();
    let received = there.accept().await.unwrap().recv().await;
    assert_eq!(received, Err(ChannelError::Cut));
}

#[tokio::test]
async fn channels_are_limited() {
    let (bad, good) = pair(LONG);
    let (here, _there) = tokio::join!(bad.endpoint.connect("good"), good.endpoint.accept());
    let here = here.unwrap();
    let mut held = Vec::new();
    for count in 0..CHANNELS_MAX {
        let opened = tokio::time::timeout(LONG, here.open()).await;
        let mut channel = opened.unwrap_or_else(|_| panic!("only {count}")).unwrap();
        channel.send(b"x").await.unwrap();
        held.push(channel);
    }
    let more = async {
        // One more may be available from the stream of the Hello.
        for _ in 0..2 {
            held.push(here.open().await.unwrap());
        }
    };
    let more = tokio::time::timeout(Duration::from_millis(300), more);
    assert!(more.await.is_err());
}

#[tokio::test]
async fn unfinished_messages_of_a_peer_share_one_budget() {
    let (bad, good) = pair(LONG);
    let (here, there) = tokio::join!(bad.endpoint.connect("good"), good.endpoint.accept());
    let (here, there) = (here.unwrap(), there.unwrap());
    let mut held = Vec::new();
    let mut taken = 0;
    for _ in 0..5 {
        let (mut send, receive) = here.link.connection.open_bi().await.unwrap();
        send.write_all(&(CONTROL_MESSAGE_BYTES_MAX as u32).to_le_bytes())
            .await
            .unwrap();
        let mut channel = there.accept().await.unwrap();
        let reader = tokio::spawn(async move { channel.recv().await });
        // All but the last byte, as far as flow control allows.
        let mut left = CONTROL_MESSAGE_BYTES_MAX - 1;
        let zeros = vec![0; 64 << 10];
        let quiet = Duration::from_millis(300);
        while left > 0
            && let Ok(written) =
                tokio::time::timeout(quiet, send.write(&zeros[..left.min(zeros.len())])).await
        {
            let written = written.unwrap();
            left -= written;
            taken += written;
        }
        held.push((send, receive, reader));
    }
    // Two fit; of the others each is limited by its stream's window.
    let most = MESSAGES_BYTES_PER_PEER_MAX + 3 * STREAM_WINDOW_BYTES as usize + 5 * (128 << 10);
    assert!(taken >= MESSAGES_BYTES_PER_PEER_MAX - 2, "{taken}");
    assert!(taken < most, "{taken} bytes of unfinished messages");
    // The first completes nevertheless, and lets the others go on.
    let (mut send, _, reader) = held.swap_remove(0);
    send.write_all(&[0]).await.unwrap();
    let message = tokio::time::timeout(LONG, reader).await.unwrap().unwrap();
    assert_eq!(message.unwrap().unwrap().len(), CONTROL_MESSAGE_BYTES_MAX);
}

#[tokio::test]
async fn a_bulk_opening_that_is_none_ends_the_connection() {
    let (bad, good) = pair(LONG);
    let link = dial(&bad, &good, ALPN_BULK).await;
    let (mut send, _receive) = link.connection.open_bi().await.unwrap();
    send.write_all(&[0x41; 200]).await.unwrap();
    assert_eq!(code_of_end(&link).await, CloseCode::BadOpening);
    let opening = BulkOpening {
        purpose: BulkPurpose::Migration,
        streams: 1,
        token: BulkToken::from_bytes([9; 32]),
        binding: binding(),
    };
    let link = dial(&bad, &good, ALPN_BULK).await;
    let (mut send, _receive) = link.connection.open_bi().await.unwrap();
    send.write_all(&opening.encode()).await.unwrap();
    assert_eq!(code_of_end(&link).await, CloseCode::BadToken);
}

#[tokio::test]
async fn bulk_streams_that_belong_elsewhere_or_nowhere_end_the_connection() {
    let (bad, good) = pair(LONG);
    let mut other = binding();
    other.epoch = Epoch(2);
    let frames = StreamKind::Frames;
    let wrong = StreamHeader {
        kind: frames,
        binding: other,
    };
    let right = StreamHeader {
        kind: frames,
        binding: binding(),
    };
    let mut oversized = right.encode().to_vec();
    oversized.extend((FRAME_BYTES_MAX as u32 + 1).to_le_bytes());
    for bytes in [wrong.encode().to_vec(), vec![0xff; 64], oversized] {
        let (link, receiver) = open_bulk(&bad, &good, 1).await;
        let mut stream = link.connection.open_uni().await.unwrap();
        stream.write_all(&bytes).await.unwrap();
        assert!(receiver.recv().await.is_err());
        assert_eq!(code_of_end(&link).await, CloseCode::Violation);
    }
}

#[tokio::test]
async fn a_bulk_peer_gets_no_more_streams_than_it_announced() {
    let (bad, good) = pair(LONG);
    let (link, _receiver) = open_bulk(&bad, &good, 2).await;
    let header = StreamHeader {
        kind: StreamKind::Frames,
        binding: binding(),
    };
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut stream = link.connection.open_uni().await.unwrap();
        stream.write_all(&header.encode()).await.unwrap();
        held.push(stream);
    }
    let more = tokio::time::timeout(Duration::from_millis(300), link.connection.open_uni());
    assert!(more.await.is_err());
}

#[tokio::test]
async fn a_stream_reset_in_the_middle_is_an_error_at_the_receiver() {
    let (bad, good) = pair(LONG);
    let (link, receiver) = open_bulk(&bad, &good, 1).await;
    let header = StreamHeader {
        kind: StreamKind::Frames,
        binding: binding(),
    };
    let mut stream = link.connection.open_uni().await.unwrap();
    let mut bytes = header.encode().to_vec();
    bytes.extend(b"\x05\0\0\0hello\x05\0\0\0he");
    stream.write_all(&bytes).await.unwrap();
    let frame = receiver.recv().await.unwrap().unwrap();
    assert_eq!(&frame[..], b"hello");
    stream.reset(VarInt::from_u32(1)).unwrap();
    let error = receiver.recv().await.unwrap_err();
    assert!(matches!(error, BulkError::Lost(_)), "{error}");
    assert_eq!(code_of_end(&link).await, CloseCode::Violation);
}

#[tokio::test]
async fn stray_datagrams_do_no_harm() {
    let (bad, good) = pair(LONG);
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = good.endpoint.local_address().unwrap();
    for first in 0..=255u8 {
        let mut datagram = vec![first; 1200];
        datagram[1..5].copy_from_slice(&[0, 0, 0, first % 3]);
        socket.send_to(&datagram, address).unwrap();
        socket.send_to(&datagram[..1], address).unwrap();
    }
    still_works(&bad, &good).await;
}
