//! Tests the sorting of datagrams, alone and on sockets.

use super::*;
use crate::endpoint::tests::{LONG, pair, still_works};
use crate::quic::{Runtime, TokioRuntime, Transmit};
use crate::stun::{BindingAnswer, BindingRequest};
use proptest::prelude::*;
use std::future::poll_fn;
use std::time::Duration;
use tokio::net::UdpSocket;

#[test]
fn the_ranges_of_rfc_9443() {
    let kind = |range: std::ops::RangeInclusive<u8>| {
        let kind = DatagramKind::of(*range.start());
        for first in range {
            assert_eq!(DatagramKind::of(first), kind, "{first}");
        }
        kind
    };
    assert_eq!(kind(0..=3), DatagramKind::Stun);
    assert_eq!(kind(4..=63), DatagramKind::Other);
    assert_eq!(kind(64..=127), DatagramKind::Quic);
    assert_eq!(kind(128..=191), DatagramKind::Other);
    assert_eq!(kind(192..=255), DatagramKind::Quic);
}

proptest! {
    #[test]
    fn no_datagram_is_lost_or_changed(
        firsts in prop::collection::vec(any::<u8>(), 0..20),
        stride in 1usize..40,
        last in 1usize..40,
    ) {
        let datagrams: Vec<Vec<u8>> = firsts
            .iter()
            .enumerate()
            .map(|(index, first)| {
                let is_last = index + 1 == firsts.len();
                let length = if is_last { last.min(stride) } else { stride };
                let mut datagram = vec![index as u8; length];
                datagram[0] = *first;
                datagram
            })
            .collect();
        let mut received = datagrams.concat();
        let mut others = Vec::new();
        let kept = keep_quic(&mut received, stride, |kind, datagram| {
            assert_eq!(kind, DatagramKind::of(datagram[0]));
            others.push(datagram.to_vec());
        });
        let (quic, rest): (Vec<Vec<u8>>, Vec<Vec<u8>>) = datagrams
            .into_iter()
            .partition(|datagram| DatagramKind::of(datagram[0]) == DatagramKind::Quic);
        prop_assert_eq!(&received[..kept], quic.concat());
        prop_assert_eq!(others, rest);
    }
}

fn socket() -> Box<dyn AsyncUdpSocket> {
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    TokioRuntime.wrap_udp_socket(socket).unwrap()
}

/// Receives until `enough`, and returns the datagrams that QUIC gets.
async fn received(mux: &mut Mux, enough: impl Fn(&[Vec<u8>], &Dropped) -> bool) -> Vec<Vec<u8>> {
    let mut datagrams = Vec::new();
    let mut bytes = vec![0; 1 << 16];
    let dropped = mux.dropped.clone();
    while !enough(&datagrams, &dropped) {
        let mut metas = [RecvMeta::default()];
        let received = poll_fn(|context| {
            mux.poll_recv(context, &mut [IoSliceMut::new(&mut bytes)], &mut metas)
        });
        let received = tokio::time::timeout(LONG, received).await.unwrap();
        assert_eq!(received.unwrap(), 1);
        let [meta] = metas;
        let quic = bytes[..meta.len].chunks(meta.stride.max(1));
        datagrams.extend(quic.map(<[u8]>::to_vec));
    }
    datagrams
}

/// Datagrams that the kernel segments and joins again may be of several kinds.
#[tokio::test]
async fn one_receive_with_several_kinds_is_taken_apart() {
    let (mut mux, _, dropped) = Mux::new(socket());
    let client = socket();
    let mut request = BindingRequest {
        transaction: [7; 12],
        fingerprint: false,
        unknown: Vec::new(),
    }
    .encode();
    // All segments have one length: an attribute that may be ignored, of 12 bytes.
    request[3] = 16;
    request.extend([0x80, 0x22, 0, 12]);
    request.extend([b'x'; 12]);
    let segment = request.len();
    let quic = |mark: u8| [vec![0x40 | mark], vec![mark; segment - 1]].concat();
    let rtp = vec![0x80; segment];
    let (one, two, mut three) = (quic(1), quic(2), quic(3));
    three.truncate(5);
    let contents = [one.clone(), request, two.clone(), rtp, three.clone()].concat();
    let transmit = Transmit {
        destination: mux.local_addr().unwrap(),
        ecn: None,
        contents: &contents,
        segment_size: Some(segment),
        src_ip: None,
    };
    let mut sender = client.create_sender();
    if sender.max_transmit_segments().get() < 5 {
        return;
    }
    poll_fn(|context| sender.as_mut().poll_send(&transmit, context))
        .await
        .unwrap();
    let got = received(&mut mux, |datagrams, _| datagrams.len() >= 3).await;
    assert_eq!(got, [one, two, three]);
    assert_eq!(dropped.get(), DroppedDatagrams { stun: 0, other: 1 });
    // The request was answered.
    let mut client = client;
    let mut bytes = vec![0; 2048];
    let mut metas = [RecvMeta::default()];
    let answer = poll_fn(|context| {
        client.poll_recv(context, &mut [IoSliceMut::new(&mut bytes)], &mut metas)
    });
    tokio::time::timeout(LONG, answer).await.unwrap().unwrap();
    let answer = BindingAnswer::decode(&bytes[..metas[0].len]).unwrap();
    assert_eq!(answer.result, Ok(client.local_addr().unwrap()));
    assert!(!answer.fingerprint);
}

#[tokio::test]
async fn what_nobody_takes_is_dropped_and_counted() {
    let (mut mux, _, dropped) = Mux::new(socket());
    let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let to = mux.local_addr().unwrap();
    let answer = BindingAnswer {
        transaction: [7; 12],
        fingerprint: true,
        result: Ok(to),
    };
    let not_asked = answer.encode();
    for datagram in [
        &b""[..],
        b"\x10zrtp",
        b"\x16dtls",
        b"\x00\x01stun",
        &not_asked,
        b"\x41quic",
    ] {
        client.send_to(datagram, to).await.unwrap();
    }
    let got = received(&mut mux, |datagrams, _| !datagrams.is_empty()).await;
    assert_eq!(got, [b"\x41quic"]);
    assert_eq!(dropped.get(), DroppedDatagrams { stun: 2, other: 3 });
}

#[tokio::test]
async fn requests_beyond_the_limit_are_dropped() {
    let (mut mux, _, _) = Mux::new(socket());
    let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let to = mux.local_addr().unwrap();
    let request = BindingRequest {
        transaction: [7; 12],
        fingerprint: true,
        unknown: Vec::new(),
    };
    // More than the burst, and more than the rate can make up for.
    while mux.dropped.get().stun == 0 {
        client.send_to(&request.encode(), to).await.unwrap();
        client.send_to(b"\x41quic", to).await.unwrap();
        received(&mut mux, |datagrams, _| !datagrams.is_empty()).await;
    }
    let mut bytes = [0; 2048];
    let length = client.recv(&mut bytes).await.unwrap();
    let answer = BindingAnswer::decode(&bytes[..length]).unwrap();
    assert_eq!(answer.result, Ok(client.local_addr().unwrap()));
    assert!(answer.fingerprint);
}

#[tokio::test]
async fn an_endpoint_answers_and_asks_on_its_socket_while_it_is_connected() {
    let (here, there) = pair(LONG);
    still_works(&here, &there).await;
    let address = there.endpoint.local_address().unwrap();
    let seen = here.endpoint.reflexive(address).await.unwrap();
    let local = here.endpoint.local_address().unwrap();
    assert_eq!((seen.address, seen.local), (local, Some(local)));
    still_works(&here, &there).await;
    assert_eq!(
        here.endpoint.dropped_datagrams(),
        DroppedDatagrams::default()
    );
}

/// Forwards datagrams as a NAT does.
async fn nat(server: SocketAddr) -> (SocketAddr, SocketAddr, tokio::task::JoinHandle<()>) {
    let inside = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let outside = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let addresses = (inside.local_addr().unwrap(), outside.local_addr().unwrap());
    let task = tokio::spawn(async move {
        let (mut out, mut back) = ([0; 2048], [0; 2048]);
        let mut client = None;
        loop {
            tokio::select! {
                received = inside.recv_from(&mut out) => {
                    let (length, from) = received.unwrap();
                    client = Some(from);
                    outside.send_to(&out[..length], server).await.unwrap();
                }
                received = outside.recv_from(&mut back) => {
                    let (length, _) = received.unwrap();
                    inside.send_to(&back[..length], client.unwrap()).await.unwrap();
                }
            }
        }
    });
    (addresses.0, addresses.1, task)
}

#[tokio::test]
async fn behind_a_nat_the_other_host_sees_another_address() {
    let (here, there) = pair(LONG);
    let (inside, outside, task) = nat(there.endpoint.local_address().unwrap()).await;
    let seen = here.endpoint.reflexive(inside).await.unwrap();
    assert_eq!(seen.address, outside);
    assert_eq!(seen.local, Some(here.endpoint.local_address().unwrap()));
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn no_answer_is_not_waited_for_long() {
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let (_mux, client, _) = Mux::new(self::socket());
    let start = tokio::time::Instant::now();
    let server = socket.local_addr().unwrap();
    let answer = client.ask(server, "127.0.0.1:1".parse().unwrap()).await;
    assert!(matches!(answer, Err(stun::ReflexiveError::NoAnswer)));
    assert_eq!(start.elapsed(), Duration::from_millis(2500));
    // It was asked three times.
    let mut bytes = [0; 2048];
    let mut asked = Vec::new();
    for _ in 0..3 {
        let length = socket.recv(&mut bytes).unwrap();
        asked.push(BindingRequest::decode(&bytes[..length]).unwrap());
    }
    assert_eq!(asked[0], asked[2]);
}
