//! Tests messages and frames between two hosts, over good and lossy paths.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use bytes::Bytes;
use common::*;
use longhaul_protocol::limits::{CONTROL_MESSAGE_BYTES_MAX, FRAME_BYTES_MAX};
use longhaul_transport::*;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Returns frame number `number`: its number, then bytes derived from it.
fn frame(number: u32, length: usize) -> Bytes {
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.resize(length.max(4), number as u8);
    bytes.into()
}

/// Sends `count` frames, finishes, and checks that each arrived once and whole.
async fn exchange(sender: &BulkSender, receiver: &BulkReceiver, count: u32, length: usize) {
    let send = async {
        for number in 0..count {
            sender.send(frame(number, length)).await.unwrap();
        }
        sender.finish().await.unwrap();
    };
    let receive = async {
        let mut seen = vec![false; count as usize];
        while let Some(bytes) = receiver.recv().await.unwrap() {
            let number = u32::from_le_bytes(*bytes.first_chunk().unwrap());
            assert_eq!(bytes, frame(number, length));
            assert!(!std::mem::replace(&mut seen[number as usize], true));
        }
        assert!(seen.into_iter().all(|seen| seen));
    };
    tokio::time::timeout(LONG, async { tokio::join!(send, receive) })
        .await
        .unwrap();
}

#[tokio::test]
async fn channels_carry_messages_both_ways_and_independently() {
    let (alpha, beta) = pair(config());
    let (here, there) = connected(&alpha, &beta).await;
    let mut first = here.open().await.unwrap();
    let mut second = here.open().await.unwrap();
    second.send(b"second").await.unwrap();
    first.send(b"first").await.unwrap();
    first.send(b"").await.unwrap();
    let mut accepted = [there.accept().await.unwrap(), there.accept().await.unwrap()];
    let mut got = Vec::new();
    for channel in &mut accepted {
        got.push(channel.recv().await.unwrap().unwrap());
    }
    let at = got.iter().position(|message| message == b"first").unwrap();
    assert_eq!(got[1 - at], b"second");
    assert_eq!(accepted[at].recv().await, Ok(Some(Vec::new())));
    accepted[at].send(b"answer").await.unwrap();
    accepted[at].finish().await.unwrap();
    assert_eq!(first.recv().await, Ok(Some(b"answer".to_vec())));
    assert_eq!(first.recv().await, Ok(None));
    let mut back = there.open().await.unwrap();
    back.send(b"the other way").await.unwrap();
    let mut back = here.accept().await.unwrap();
    assert_eq!(back.recv().await, Ok(Some(b"the other way".to_vec())));
}

#[tokio::test]
async fn the_largest_message_passes_and_a_larger_one_is_not_sent() {
    let (alpha, beta) = pair(config());
    let (here, there) = connected(&alpha, &beta).await;
    let largest = vec![0xa5; CONTROL_MESSAGE_BYTES_MAX];
    let mut channel = here.open().await.unwrap();
    let error = channel.send(&vec![0; CONTROL_MESSAGE_BYTES_MAX + 1]).await;
    assert!(matches!(error, Err(ChannelError::TooLarge { .. })));
    let send = channel.send(&largest);
    let receive = async { there.accept().await.unwrap().recv().await };
    let (sent, received) = tokio::join!(send, receive);
    sent.unwrap();
    assert!(received.unwrap().unwrap() == largest);
}

#[tokio::test]
async fn a_cancelled_receive_or_send_loses_nothing() {
    let (alpha, beta) = pair(config());
    let (here, there) = connected(&alpha, &beta).await;
    let (mut send, _keep) = here.open().await.unwrap().split();
    let large = vec![1; CONTROL_MESSAGE_BYTES_MAX];
    // More than the windows hold, so that some call must wait and is cancelled.
    let mut whole = 0;
    for _ in 0..8 {
        let sent = tokio::time::timeout(Duration::from_millis(50), send.send(&large)).await;
        whole += u32::from(sent.is_ok());
    }
    assert!(whole < 8);
    let (_keep, mut receive) = there.accept().await.unwrap().split();
    let finish = async {
        send.finish().await.unwrap();
    };
    let drain = async {
        let mut count = 0;
        loop {
            match tokio::time::timeout(Duration::from_millis(1), receive.recv()).await {
                Ok(Ok(Some(message))) => {
                    assert!(message == large);
                    count += 1;
                }
                Ok(Ok(None)) => return count,
                Ok(Err(error)) => panic!("{error}"),
                Err(_) => {}
            }
        }
    };
    let both = async { tokio::join!(finish, drain) };
    let ((), count) = tokio::time::timeout(LONG, both).await.unwrap();
    assert!(count >= whole && count <= 8, "{count} of {whole}");
}

#[tokio::test]
async fn frames_on_many_streams_all_arrive_and_are_acknowledged() {
    let (alpha, beta) = pair(config());
    let (here, there) = connected(&alpha, &beta).await;
    let (sender, receiver) = bulk(&here, &there, BulkConfig::default()).await;
    assert_eq!(sender.binding(), receiver.binding());
    receiver.acknowledge(b"so far so good").await.unwrap();
    let message = sender.acknowledgement().await.unwrap();
    assert_eq!(message.as_deref(), Some(&b"so far so good"[..]));
    exchange(&sender, &receiver, 500, 100_000).await;
    receiver.acknowledge(b"everything").await.unwrap();
    receiver.finish().await.unwrap();
    let message = sender.acknowledgement().await.unwrap();
    assert_eq!(message.as_deref(), Some(&b"everything"[..]));
    assert_eq!(sender.acknowledgement().await, Ok(None));
    assert!(sender.stats().wire_bytes_sent > 500 * 100_000);
    assert!(receiver.bytes_received() > 500 * 100_000);
}

#[tokio::test]
async fn the_largest_frame_passes_on_a_single_stream() {
    let (alpha, beta) = pair(config());
    let (here, there) = connected(&alpha, &beta).await;
    let single = BulkConfig {
        streams: 1,
        bandwidth_bps: None,
    };
    let (sender, receiver) = bulk(&here, &there, single).await;
    let too_large = sender.send(frame(0, FRAME_BYTES_MAX + 1)).await;
    assert!(matches!(too_large, Err(BulkError::TooLarge { .. })));
    exchange(&sender, &receiver, 8, FRAME_BYTES_MAX).await;
}

#[tokio::test]
async fn frames_survive_a_road_that_loses_every_twentieth_datagram() {
    let (alpha, beta) = pair(config());
    let road = Road::new(beta.address(), 20).await;
    alpha.trust_at("beta", &beta, ALL, road.address);
    let (here, there) = connected(&alpha, &beta).await;
    // The bulk connection uses the same path on a socket of its own at the far side.
    let bulk_road = Road::new(beta.address(), 20).await;
    drop(here);
    alpha.trust_at("beta", &beta, ALL, bulk_road.address);
    let (here, _there) = connected(&alpha, &beta).await;
    let (sender, receiver) = bulk(&here, &there, BulkConfig::default()).await;
    exchange(&sender, &receiver, 60, 60_000).await;
    assert!(bulk_road.lost.load(Ordering::Relaxed) > 0);
    assert!(sender.stats().packets_lost > 0);
}

#[tokio::test]
async fn traffic_goes_on_after_a_cut_shorter_than_the_idle_time_out() {
    let (alpha, beta) = pair(config());
    let road = Road::new(beta.address(), 0).await;
    alpha.trust_at("beta", &beta, ALL, road.address);
    let (here, there) = connected(&alpha, &beta).await;
    let (sender, receiver) = bulk(&here, &there, BulkConfig::default()).await;
    let cut = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        road.cut.store(true, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_secs(2)).await;
        road.cut.store(false, Ordering::Relaxed);
    };
    let slow = async {
        sender.set_bandwidth(Some(40_000_000));
        exchange(&sender, &receiver, 100, 100_000).await;
    };
    tokio::join!(cut, slow);
    assert!(road.lost.load(Ordering::Relaxed) > 0);
}

#[tokio::test]
async fn a_longer_cut_is_a_time_out_and_may_be_redialled() {
    let mut quick = config();
    quick.idle_timeout = Duration::from_secs(1);
    quick.keep_alive = Duration::from_millis(300);
    let (alpha, beta) = pair(quick);
    let road = Road::new(beta.address(), 0).await;
    alpha.trust_at("beta", &beta, ALL, road.address);
    let (here, there) = connected(&alpha, &beta).await;
    let (sender, receiver) = bulk(&here, &there, BulkConfig::default()).await;
    road.cut.store(true, Ordering::Relaxed);
    let sends = async {
        loop {
            if let Err(error) = sender.send(frame(0, 100_000)).await {
                return error;
            }
        }
    };
    let receives = async {
        loop {
            match receiver.recv().await {
                Ok(frame) => assert!(frame.is_some()),
                Err(error) => return error,
            }
        }
    };
    let both = async { tokio::join!(sends, receives, sender.acknowledgement()) };
    let (sent, received, acknowledged) = tokio::time::timeout(LONG, both).await.unwrap();
    let timed_out = BulkError::Lost(LinkError::TimedOut);
    assert_eq!((&sent, &received), (&timed_out, &timed_out));
    assert_eq!(acknowledged, Err(timed_out));
    assert_eq!(here.closed().await, LinkError::TimedOut);
    assert!(LinkError::TimedOut.may_redial());
    road.cut.store(false, Ordering::Relaxed);
    let (here, there) = connected(&alpha, &beta).await;
    let (sender, receiver) = bulk(&here, &there, BulkConfig::default()).await;
    exchange(&sender, &receiver, 10, 1000).await;
}

#[tokio::test]
async fn whoever_closes_is_understood_at_the_other_end() {
    let (alpha, beta) = pair(config());
    let (here, there) = connected(&alpha, &beta).await;
    let (sender, receiver) = bulk(&here, &there, BulkConfig::default()).await;
    receiver.close(CloseCode::Other(77), "the disk is full");
    let error = sender.closed().await;
    let code = CloseCode::Other(77);
    let reason = "the disk is full".to_owned();
    assert_eq!(error, LinkError::ClosedByPeer { code, reason });
    assert!(matches!(sender.reserve().await, Err(BulkError::Lost(lost)) if lost == error));
    // Errors on the bulk connection do not affect control.
    let mut channel = here.open().await.unwrap();
    channel.send(b"still here").await.unwrap();
    let message = there.accept().await.unwrap().recv().await;
    assert_eq!(message, Ok(Some(b"still here".to_vec())));
    beta.endpoint.close("shut down for maintenance").await;
    let error = here.closed().await;
    assert!(error.may_redial(), "{error}");
    assert!(error.to_string().contains("maintenance"), "{error}");
    assert!(beta.endpoint.accept().await.is_none());
}

#[tokio::test]
async fn a_token_is_good_once() {
    let (alpha, beta) = pair(config());
    let (here, there) = connected(&alpha, &beta).await;
    let offer = there.offer_bulk(binding(1), LONG).unwrap();
    let token = offer.token().clone();
    let connect = |epoch| here.connect_bulk(&token, binding(epoch), BulkConfig::default());
    let (first, accepted) = tokio::join!(connect(1), offer.accept());
    let (_first, _accepted) = (first.unwrap(), accepted.unwrap());
    match connect(1).await.unwrap_err() {
        ConnectError::Refused { code, .. } => assert_eq!(code, CloseCode::BadToken),
        error => panic!("{error}"),
    }
    let offer = there.offer_bulk(binding(1), LONG).unwrap();
    let wrong_epoch = here.connect_bulk(offer.token(), binding(2), BulkConfig::default());
    match wrong_epoch.await.unwrap_err() {
        ConnectError::Refused { code, .. } => assert_eq!(code, CloseCode::BadToken),
        error => panic!("{error}"),
    }
}

#[tokio::test]
async fn another_trusted_host_cannot_use_the_token() {
    let (alpha, beta) = pair(config());
    let gamma = Host::new(config());
    gamma.trust("beta", &beta, ALL);
    beta.trust("gamma", &gamma, ALL);
    let (_here, there) = connected(&alpha, &beta).await;
    let (gammas, _) = connected(&gamma, &beta).await;
    let offer = there.offer_bulk(binding(1), LONG).unwrap();
    let stolen = gammas.connect_bulk(offer.token(), binding(1), BulkConfig::default());
    match stolen.await.unwrap_err() {
        ConnectError::Refused { code, .. } => assert_eq!(code, CloseCode::BadToken),
        error => panic!("{error}"),
    }
}

#[tokio::test]
async fn an_offer_nobody_takes_up_ends() {
    let (alpha, beta) = pair(config());
    let (_here, there) = connected(&alpha, &beta).await;
    let offer = there.offer_bulk(binding(1), Duration::from_millis(50));
    let error = offer.unwrap().accept().await.unwrap_err();
    assert!(matches!(error, BulkError::NotMade(_)), "{error}");
}

#[tokio::test]
async fn the_bandwidth_limit_holds_and_changes_while_frames_flow() {
    const SLOW_BPS: u64 = 16_000_000;
    let (alpha, beta) = pair(config());
    let (here, there) = connected(&alpha, &beta).await;
    let limited = BulkConfig {
        streams: 16,
        bandwidth_bps: Some(SLOW_BPS),
    };
    let (sender, receiver) = bulk(&here, &there, limited).await;
    assert_eq!(sender.bandwidth(), Some(SLOW_BPS));
    let drain = async { while let Ok(Some(_)) = receiver.recv().await {} };
    let flood = async { while sender.send(frame(0, 100_000)).await.is_ok() {} };
    let watch = async {
        let (start, before) = (Instant::now(), sender.stats().wire_bytes_sent);
        tokio::time::sleep(Duration::from_secs(3)).await;
        let sent = sender.stats().wire_bytes_sent - before;
        let bound = start.elapsed().as_secs_f64() * SLOW_BPS as f64 / 8.0;
        assert!((sent as f64) < bound * 1.05 + 64e3, "{sent} of {bound}");
        sender.set_bandwidth(Some(20 * SLOW_BPS));
        // However slow the machine, some half second exceeds the old limit.
        while sender.stats().delivery_rate_bps < 2 * SLOW_BPS {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(LONG, async {
        tokio::select! {
            () = drain => panic!("the receiver ended"),
            () = flood => panic!("the sender ended"),
            () = watch => {}
        }
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn what_waits_locally_is_bounded_while_the_receiver_does_not_read() {
    let (alpha, beta) = pair(config());
    let (here, there) = connected(&alpha, &beta).await;
    let (sender, receiver) = bulk(&here, &there, BulkConfig::default()).await;
    let mut sent = 0;
    let length = 100_000;
    let blocked = async {
        loop {
            let wait = Duration::from_secs(2);
            match tokio::time::timeout(wait, sender.send(frame(sent, length))).await {
                Ok(result) => result.unwrap(),
                Err(_) => return sent,
            }
            sent += 1;
        }
    };
    let taken = tokio::time::timeout(LONG, blocked).await.unwrap();
    assert!(u64::from(taken) * (length as u64) < 100 << 20, "{taken}");
    assert!(receiver.recv().await.unwrap().is_some());
}

#[tokio::test]
async fn a_measurement_counts_what_arrived_and_needs_permission() {
    let (alpha, beta) = pair(config());
    let config = ProbeConfig {
        duration: Duration::from_millis(500),
        bandwidth_bps: Some(80_000_000),
        streams: 4,
        until_known: false,
    };
    let mut samples = 0;
    let report = alpha.endpoint.probe("beta", config, |_| samples += 1).await;
    let report = report.unwrap();
    assert!(samples > 0);
    assert!(report.throughput_bps > 0 && report.throughput_bps < 100_000_000);
    let reflexive = async {
        loop {
            // The answer may be late on a busy machine.
            let report = alpha.endpoint.probe("beta", config, |_| {}).await;
            if let Ok(ProbeReport {
                reflexive: Some(seen),
                ..
            }) = report
            {
                return seen;
            }
        }
    };
    let seen = tokio::time::timeout(LONG, reflexive).await.unwrap();
    assert_eq!(seen.address, alpha.address());
    assert_eq!(seen.local, Some(alpha.address()));
    let send_only = Scope {
        may_query: false,
        may_send_guests: true,
    };
    beta.trust("alpha", &alpha, send_only);
    let refused = alpha.endpoint.probe("beta", config, |_| {}).await;
    match refused.unwrap_err() {
        ProbeError::Connect(ConnectError::Refused { code, .. }) => {
            assert_eq!(code, CloseCode::NotAllowed);
        }
        error => panic!("{error}"),
    }
}

#[test]
fn a_restarted_agent_resets_its_peers_connections() {
    // A runtime that is torn down sometimes sends a close, which a killed agent never does: such a
    // try proves nothing.
    let tries = 20;
    assert!(
        (0..tries).any(|_| restart_without_a_word()),
        "no try went without a goodbye"
    );
}

/// Returns whether the agent ended without a close.
fn restart_without_a_word() -> bool {
    let runtime = || tokio::runtime::Runtime::new().unwrap();
    let (here, there) = (runtime(), runtime());
    let (alpha, beta) = here.block_on(async {
        let alpha = Host::new(config());
        let beta = there.spawn(async { Host::new(config()) }).await.unwrap();
        alpha.trust("beta", &beta, ALL);
        beta.trust("alpha", &alpha, ALL);
        (alpha, beta)
    });
    let (control, _) = here.block_on(connected(&alpha, &beta));
    let address = beta.address();
    // The agent dies without a close, as after kill -9, and is started again.
    there.shutdown_background();
    let folder = beta.folder;
    drop(beta.endpoint);
    let mut again = config();
    again.listen = address;
    here.block_on(async {
        let bound = async {
            loop {
                let identity = Identity::load_or_create(folder.path()).unwrap();
                let trust = TrustStore::open(&folder.path().join(TRUST_FILE)).unwrap();
                match Endpoint::bind(again.clone(), identity, trust) {
                    Ok(endpoint) => return endpoint,
                    Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            }
        };
        let _endpoint = tokio::time::timeout(LONG, bound).await.unwrap();
        let error = control.closed().await;
        if matches!(error, LinkError::ClosedByPeer { .. }) {
            return false;
        }
        assert_eq!(error, LinkError::Reset);
        assert!(error.may_redial());
        alpha.endpoint.connect("beta").await.unwrap();
        true
    })
}
