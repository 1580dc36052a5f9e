//! Tests which way two hosts reach each other, and that their connection stays when it changes.

use super::host::{Host, LONG};
use super::rendezvous::Rendezvous;
use super::site::{self, Nat, Site};
use longhaul_network::reach::PeerStatus;
use longhaul_paths::{Obstacle, State};
use longhaul_transport::{Control, Identity};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Two hosts with a rendezvous server, and their control connection.
struct Pair {
    hosts: [Host; 2],
    rendezvous: Rendezvous,
    /// Messages that were answered.
    pings: Arc<AtomicU64>,
    controls: [Control; 2],
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Pair {
    async fn start(rendezvous: Rendezvous, site: Option<&Site>, listen: &str) -> Self {
        let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let ids = folders
            .each_ref()
            .map(|folder| Identity::load_or_create(folder.path()).unwrap().host_id());
        let mut index = 0;
        let hosts = folders.map(|folder| {
            let namespace = site.map(|site| site.file(&format!("h{index}")));
            let host = Host::start(folder, ids[1 - index], listen, &rendezvous, namespace);
            index += 1;
            host
        });
        for host in &hosts {
            rendezvous.register(host.id, &host.reach);
        }
        let controls = [hosts[0].control().await, hosts[1].control().await];
        let mut pair = Self {
            hosts,
            rendezvous,
            pings: Arc::default(),
            controls,
            tasks: Vec::new(),
        };
        pair.ping().await;
        pair
    }

    /// Begins to exchange messages on the control connection, as long as it lives.
    async fn ping(&mut self) {
        let [here, there] = self.controls.clone();
        let mut channel = here.open().await.unwrap();
        channel.send(b"first").await.unwrap();
        let mut other = there.accept().await.unwrap();
        let pings = self.pings.clone();
        self.tasks.push(tokio::spawn(async move {
            while let Ok(Some(message)) = other.recv().await {
                if other.send(&message).await.is_err() {
                    return;
                }
            }
        }));
        self.tasks.push(tokio::spawn(async move {
            while let Ok(Some(message)) = channel.recv().await {
                pings.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(20)).await;
                if channel.send(&message).await.is_err() {
                    return;
                }
            }
        }));
    }

    /// Waits until both hosts use such a way.
    async fn both(&self, what: &str, wanted: impl Fn(&PeerStatus) -> bool) {
        for host in &self.hosts {
            host.reaches(what, &wanted).await;
        }
    }

    /// Checks that the connection is the one from the beginning, and works.
    async fn still_works(&self) {
        let before = self.pings.load(Ordering::Relaxed);
        let start = Instant::now();
        while self.pings.load(Ordering::Relaxed) < before + 3 {
            assert!(start.elapsed() < LONG, "no message passes");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        for host in &self.hosts {
            assert_eq!(host.plane.controls.lock().unwrap().len(), 1);
        }
    }

    /// Checks that nothing is relayed any more, in some interval.
    async fn relays_nothing(&self) {
        let start = Instant::now();
        loop {
            let (relayed, pings) = (
                self.rendezvous.relayed(),
                self.pings.load(Ordering::Relaxed),
            );
            while self.pings.load(Ordering::Relaxed) < pings + 5 {
                assert!(start.elapsed() < LONG, "no message passes");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            if self.rendezvous.relayed() == relayed {
                return;
            }
            assert!(start.elapsed() < LONG, "datagrams are still relayed");
        }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.tasks.iter().for_each(|task| task.abort());
    }
}

fn is_direct(status: &PeerStatus) -> bool {
    matches!(status.state, State::Direct { .. })
}

fn is_relayed(status: &PeerStatus) -> bool {
    matches!(status.state, State::Relayed { tcp: false, .. })
}

/// Two hosts behind these NATs must reach each other directly, or by the relay.
async fn behind(nats: [Nat; 2], direct: bool) {
    let Some(site) = Site::new(nats) else {
        return;
    };
    let rendezvous = Rendezvous::start(site::SERVER, Some(site.file("net")));
    let pair = Pair::start(rendezvous, Some(&site), "0.0.0.0:7400").await;
    if !direct {
        let hopeless = |status: &PeerStatus| {
            let State::Relayed { obstacle, .. } = &status.state else {
                return false;
            };
            *obstacle == Obstacle::BothDependent
        };
        pair.both("relayed for its reason", hopeless).await;
        pair.still_works().await;
        return;
    }
    pair.both("direct", is_direct).await;
    pair.still_works().await;
    pair.relays_nothing().await;
    // The direct path dies: the connection goes on through the relay, and back again.
    site.cut();
    pair.both("relayed again", is_relayed).await;
    pair.still_works().await;
    site.restore();
    pair.both("direct again", is_direct).await;
    pair.still_works().await;
    pair.relays_nothing().await;
}

macro_rules! pairs {
    ($($name:ident: $one:ident, $other:ident => $direct:expr;)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            behind([Nat::$one, Nat::$other], $direct).await;
        }
    )*};
}

pairs! {
    no_nat_at_both: None, None => true;
    no_nat_and_symmetric: None, Symmetric => true;
    full_cone_at_both: FullCone, FullCone => true;
    full_cone_and_restricted: FullCone, Restricted => true;
    full_cone_and_port_restricted: FullCone, PortRestricted => true;
    full_cone_and_symmetric: FullCone, Symmetric => true;
    restricted_at_both: Restricted, Restricted => true;
    restricted_and_port_restricted: Restricted, PortRestricted => true;
    restricted_and_symmetric: Restricted, Symmetric => true;
    port_restricted_at_both: PortRestricted, PortRestricted => true;
    port_restricted_and_symmetric: PortRestricted, Symmetric => true;
    symmetric_at_both: Symmetric, Symmetric => false;
}

/// In one network, without namespaces and without root.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_one_network_hosts_find_each_other_over_either_family() {
    for listen in ["0.0.0.0:0", "[::]:0"] {
        let rendezvous = Rendezvous::start([127, 0, 0, 1], None);
        let pair = Pair::start(rendezvous, None, listen).await;
        let has_address = nix::ifaddrs::getifaddrs().unwrap().any(|interface| {
            let flags = interface.flags;
            let loopback = nix::net::if_::InterfaceFlags::IFF_LOOPBACK;
            let ip = interface
                .address
                .and_then(|address| address.as_sockaddr_in().copied());
            !flags.contains(loopback) && ip.is_some()
        });
        if has_address {
            pair.both("direct", is_direct).await;
            pair.relays_nothing().await;
        } else {
            // Loopback addresses are never offered.
            pair.both("relayed", is_relayed).await;
        }
        pair.still_works().await;
        for host in &pair.hosts {
            let status = host.reach.status().borrow().clone();
            assert_eq!((status.refused_probes, status.refused_signals), (0, 0));
            assert_eq!(host.endpoint.dropped_datagrams().frames, 0);
        }
    }
}
