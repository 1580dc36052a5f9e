//! Tests connections over several network paths at once, of which some are cut and come back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use bytes::Bytes;
use common::*;
use longhaul_transport::*;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::net::UdpSocket;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout};

const FRAME_BYTES: usize = 50_000;
/// The rate of a path, in bytes per second, and its queue.
const RATE: f64 = 2.5e6;
const QUEUE: Duration = Duration::from_millis(60);

/// A path to a server with a rate of its own towards it, which can be cut.
struct Path {
    address: SocketAddr,
    cut: Arc<AtomicBool>,
    /// Bytes towards the server that were let through.
    carried: Arc<AtomicU64>,
    task: tokio::task::JoinHandle<()>,
}

impl Path {
    async fn new(server: SocketAddr, rate: f64) -> Self {
        let outside = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
        let inside = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
        inside.connect(server).await.unwrap();
        let address = outside.local_addr().unwrap();
        let (cut, carried) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (is_cut, count) = (cut.clone(), carried.clone());
        let (late, mut due) = mpsc::unbounded_channel::<(Instant, Vec<u8>)>();
        let to_server = inside.clone();
        let delay = async move {
            while let Some((at, datagram)) = due.recv().await {
                sleep_until(at).await;
                let _ = to_server.send(&datagram).await;
            }
        };
        let forward = async move {
            let (mut out, mut back) = (vec![0; 65536], vec![0; 65536]);
            let mut client = None;
            let mut free_at = Instant::now();
            loop {
                tokio::select! {
                    Ok((length, from)) = outside.recv_from(&mut out) => {
                        client = Some(from);
                        let now = Instant::now();
                        free_at = free_at.max(now);
                        if is_cut.load(Ordering::Relaxed) || free_at - now > QUEUE {
                            continue;
                        }
                        free_at += Duration::from_secs_f64(length as f64 / rate);
                        count.fetch_add(length as u64, Ordering::Relaxed);
                        let _ = late.send((free_at, out[..length].to_vec()));
                    }
                    Ok(length) = inside.recv(&mut back) => {
                        if let (Some(client), false) = (client, is_cut.load(Ordering::Relaxed)) {
                            let _ = outside.send_to(&back[..length], client).await;
                        }
                    }
                }
            }
        };
        let task = tokio::spawn(async {
            tokio::join!(delay, forward);
        });
        Self {
            address,
            cut,
            carried,
            task,
        }
    }

    fn set_cut(&self, cut: bool) {
        self.cut.store(cut, Ordering::Relaxed);
    }

    fn carried(&self) -> u64 {
        self.carried.load(Ordering::Relaxed)
    }
}

impl Drop for Path {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Returns `alpha`, which has two paths to `beta`, and `beta`.
async fn over_two_paths(rates: [f64; 2]) -> (Host, Host, [Path; 2]) {
    let beta = Host::new(config());
    let [one, two] = rates.map(|rate| Path::new(beta.address(), rate));
    let paths = [one.await, two.await];
    let mut config = config();
    let to = |path: &Path| PathTo {
        to: path.address,
        from: None,
    };
    config.paths = vec![("beta".to_owned(), paths.iter().map(to).collect())];
    let alpha = Host::new(config);
    alpha.trust_at("beta", &beta, ALL, paths[0].address);
    beta.trust("alpha", &alpha, ALL);
    (alpha, beta, paths)
}

fn frame(number: u32) -> Bytes {
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.resize(FRAME_BYTES, number as u8);
    bytes.into()
}

/// Waits until something is so.
async fn until(what: &str, is_so: impl Fn() -> bool) {
    let waited = timeout(LONG, async {
        while !is_so() {
            sleep(Duration::from_millis(10)).await;
        }
    });
    assert!(waited.await.is_ok(), "{what}");
}

/// Sends frames over two paths, of which one is cut at a third of them. Each frame arrives once.
async fn nothing_is_lost_with(lost: usize) {
    const FRAMES: u32 = 240;
    let (alpha, beta, paths) = over_two_paths([RATE, RATE]).await;
    let (here, there) = connected(&alpha, &beta).await;
    let (sender, receiver) = bulk(&here, &there, BulkConfig::default()).await;
    let send = async {
        for number in 0..FRAMES {
            sender.send(frame(number)).await.unwrap();
        }
        sender.finish().await.unwrap();
    };
    let receive = async {
        let mut seen = vec![false; FRAMES as usize];
        let mut count = 0;
        while let Some(bytes) = receiver.recv().await.unwrap() {
            let number = u32::from_le_bytes(*bytes.first_chunk().unwrap());
            assert_eq!(bytes, frame(number));
            assert!(!std::mem::replace(&mut seen[number as usize], true));
            count += 1;
            if count == FRAMES / 3 {
                let carried = paths.each_ref().map(Path::carried);
                let least = u64::from(FRAMES / 3) * FRAME_BYTES as u64 / 5;
                assert!(carried.iter().all(|bytes| *bytes > least), "{carried:?}");
                paths[lost].set_cut(true);
            }
        }
        assert!(seen.into_iter().all(|seen| seen));
    };
    timeout(LONG, async { tokio::join!(send, receive) })
        .await
        .unwrap();
    // The path that was lost is not up any more, and its traffic is not forgotten.
    let traffic = sender.traffic();
    assert_eq!(traffic.len(), 2, "{traffic:?}");
    for (n, path) in paths.iter().enumerate() {
        let of_path = |of: &&PathTraffic| of.path.to == path.address;
        let traffic = traffic.iter().find(of_path).unwrap();
        assert_eq!(traffic.is_up, n != lost, "{traffic:?}");
        assert!(traffic.sent_bytes >= path.carried(), "{traffic:?}");
    }
    // Messages pass over the path that is left.
    let mut channel = here.open().await.unwrap();
    channel.send(b"still here").await.unwrap();
    let heard = async { there.accept().await.unwrap().recv().await };
    let heard = timeout(LONG, heard).await.unwrap();
    assert_eq!(heard, Ok(Some(b"still here".to_vec())));
}

#[tokio::test]
async fn the_path_of_the_connection_is_lost_and_nothing_with_it() {
    nothing_is_lost_with(0).await;
}

#[tokio::test]
async fn another_path_is_lost_and_nothing_with_it() {
    nothing_is_lost_with(1).await;
}

#[tokio::test]
async fn a_path_that_comes_late_or_comes_back_is_used() {
    let (alpha, beta, paths) = over_two_paths([RATE, RATE]).await;
    paths[1].set_cut(true);
    let (here, there) = connected(&alpha, &beta).await;
    let (sender, receiver) = bulk(&here, &there, BulkConfig::default()).await;
    let send = async {
        for number in 0.. {
            sender.send(frame(number)).await.unwrap();
        }
    };
    let receive = async {
        while let Some(bytes) = receiver.recv().await.unwrap() {
            let number = u32::from_le_bytes(*bytes.first_chunk().unwrap());
            assert_eq!(bytes, frame(number));
        }
        panic!("the sender does not end");
    };
    let is_up = |n: usize| {
        let address = paths[n].address;
        let traffic = sender.traffic();
        traffic.iter().any(|of| of.path.to == address && of.is_up)
    };
    let data = |n: usize| {
        let before = paths[n].carried();
        move |path: &Path| path.carried() > before + 20 * FRAME_BYTES as u64
    };
    let check = async {
        let carries = data(0);
        until("the first path carries data", || carries(&paths[0])).await;
        assert!(!is_up(1));
        paths[1].set_cut(false);
        let carries = data(1);
        until("a late path carries data", || carries(&paths[1])).await;
        paths[0].set_cut(true);
        until("a silent path is given up", || !is_up(0)).await;
        let carries = data(1);
        until("the other one carries on", || carries(&paths[1])).await;
        paths[0].set_cut(false);
        let carries = data(0);
        until("it is used again", || carries(&paths[0])).await;
    };
    tokio::select! {
        () = send => {}
        () = receive => {}
        () = check => {}
    }
}

#[tokio::test]
async fn a_limit_holds_for_all_paths_together() {
    let (alpha, beta, paths) = over_two_paths([RATE, RATE]).await;
    let (here, there) = connected(&alpha, &beta).await;
    let limited = BulkConfig {
        bandwidth_bps: Some(8_000_000),
        ..BulkConfig::default()
    };
    let (sender, receiver) = bulk(&here, &there, limited).await;
    let send = async {
        for number in 0.. {
            sender.send(frame(number)).await.unwrap();
        }
    };
    let receive = async { while receiver.recv().await.unwrap().is_some() {} };
    let check = async {
        // The start is not limited by more than the pacer.
        sleep(Duration::from_secs(1)).await;
        let sum = || paths.iter().map(Path::carried).sum::<u64>();
        let (before, began) = (sum(), Instant::now());
        sleep(Duration::from_secs(2)).await;
        // No more than the limit, on however slow a machine.
        let rate = (sum() - before) as f64 * 8.0 / began.elapsed().as_secs_f64();
        assert!(rate < 8.8e6, "{rate}");
    };
    tokio::select! {
        () = send => {}
        () = receive => {}
        () = check => {}
    }
}

#[tokio::test]
async fn a_measurement_ends_at_both_hosts_whatever_path_is_down() {
    let (alpha, beta, paths) = over_two_paths([RATE, RATE]).await;
    let accept = async { while beta.endpoint.accept().await.is_some() {} };
    let measure = async {
        for down in [1, 0, 1] {
            paths[1 - down].set_cut(false);
            paths[down].set_cut(true);
            let config = ProbeConfig {
                duration: Duration::from_secs(2),
                ..ProbeConfig::default()
            };
            // The other host takes part in one at a time.
            let report = alpha.endpoint.probe("beta", config, |_| {}).await.unwrap();
            assert!(report.throughput_bps > 0);
            sleep(Duration::from_millis(500)).await;
        }
    };
    tokio::select! {
        () = accept => {}
        () = measure => {}
    }
}

/// Opens paths to one address from several addresses of this host, over a socket of either family.
async fn paths_leave_from_their_addresses(listen: &str) {
    let beta = Host::new(config());
    let mut config = EndpointConfig::new(listen.parse().unwrap(), hello(1, 1));
    // The first one is that which the system chooses for the connection itself.
    let from = ["127.0.0.1", "127.0.0.2", "127.0.0.3"].map(|ip| ip.parse().unwrap());
    let to = beta.address();
    let path = |from| PathTo {
        to,
        from: Some(from),
    };
    config.paths = vec![("beta".to_owned(), from.map(path).to_vec())];
    let alpha = Host::new(config);
    alpha.trust("beta", &beta, ALL);
    beta.trust("alpha", &alpha, ALL);
    let (here, there) = connected(&alpha, &beta).await;
    let (sender, receiver) = bulk(&here, &there, BulkConfig::default()).await;
    let up = || {
        let traffic = sender.traffic().into_iter().filter(|of| of.is_up);
        let mut up: Vec<_> = traffic.filter_map(|of| of.path.from).collect();
        up.sort();
        up
    };
    until("all paths are up", || up() == from).await;
    assert_eq!(sender.traffic().len(), from.len(), "no other path");
    // So the other host sees them.
    let seen = || {
        let traffic = receiver.traffic().into_iter().filter(|of| of.is_up);
        let mut seen: Vec<_> = traffic.map(|of| of.path.to.ip().to_canonical()).collect();
        seen.sort();
        seen
    };
    until("all paths are seen", || seen() == from).await;
    sender.send(frame(7)).await.unwrap();
    assert_eq!(receiver.recv().await.unwrap(), Some(frame(7)));
}

#[tokio::test]
async fn paths_leave_from_their_addresses_over_an_ipv4_socket() {
    paths_leave_from_their_addresses("0.0.0.0:0").await;
}

#[tokio::test]
async fn paths_leave_from_their_addresses_over_a_socket_of_both_families() {
    paths_leave_from_their_addresses("[::]:0").await;
}
