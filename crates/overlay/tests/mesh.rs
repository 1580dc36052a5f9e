//! Drives the switches of several hosts and networks with random events, by seed, and compares
//! where frames arrive with a model that knows where every guest is.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

use longhaul_overlay::switch::{Behind, Output, PortConfig, PortId, Redirect};
use longhaul_overlay::{Mac, Rate, Switch, SwitchConfig};
use longhaul_protocol::HostId;
use std::collections::HashMap;
use std::time::Duration;

const HOSTS: usize = 4;
const NETWORKS: usize = 2;
const GUESTS: usize = 5;
const SEEDS: u64 = 300;
const STEPS: usize = 300;
const VLANS: [u16; 3] = [0, 7, 4094];

/// A generator of numbers (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % limit as u64) as usize
    }
}

/// A guest: its port is on one host at a time. The same MAC addresses are in all networks.
struct Guest {
    host: usize,
    port: PortId,
    generation: u64,
    pinned: bool,
}

struct World {
    random: Random,
    now: Duration,
    /// Whether other hosts may miss announcements.
    lossy: bool,
    switches: Vec<Vec<Switch>>,
    guests: Vec<Vec<Guest>>,
    /// How often a frame arrived, by network, host and port.
    arrived: HashMap<(usize, usize, PortId), usize>,
}

fn host(number: usize) -> HostId {
    HostId([number as u8 + 1; 32])
}

fn mac(guest: usize) -> Mac {
    Mac([2, 0, 0, 0, 0, guest as u8 + 1])
}

fn generous() -> PortConfig {
    let rate = Rate {
        per_second: 1_000_000,
        burst: 1_000_000,
    };
    PortConfig {
        flood: rate,
        multicast: rate,
        ..PortConfig::HOST
    }
}

impl World {
    fn new(seed: u64) -> Self {
        let mut config = SwitchConfig::new([seed, !seed]);
        config.moves_max = u32::MAX;
        let mut switches = Vec::new();
        for here in 0..HOSTS {
            switches.push(Vec::new());
            for _ in 0..NETWORKS {
                let mut switch = Switch::new(config);
                for other in (0..HOSTS).filter(|other| *other != here) {
                    switch.add_host(host(other), generous()).unwrap();
                }
                switches[here].push(switch);
            }
        }
        let mut world = Self {
            random: Random(seed),
            now: Duration::from_secs(seed),
            lossy: seed.is_multiple_of(2),
            switches,
            guests: Vec::new(),
            arrived: HashMap::new(),
        };
        for network in 0..NETWORKS {
            let guests = (0..GUESTS).map(|guest| {
                let pinned = guest % 2 == 0;
                let at = world.random.below(HOSTS);
                world.add(network, at, guest, pinned, 1)
            });
            let guests = guests.collect();
            world.guests.push(guests);
        }
        world
    }

    fn add(&mut self, network: usize, at: usize, guest: usize, pinned: bool, now: u64) -> Guest {
        let switch = &mut self.switches[at][network];
        let config = PortConfig {
            only_own_mac: pinned,
            ..generous()
        };
        let port = switch.add_local(config).unwrap();
        if pinned {
            switch.pin(self.now, port, mac(guest), now).unwrap();
        }
        Guest {
            host: at,
            port,
            generation: now,
            pinned,
        }
    }

    /// Sends a frame, and delivers all copies.
    fn send(&mut self, network: usize, from: usize, to: Mac, vlan: u16) {
        self.arrived.clear();
        let mut frame = [to.0, mac(from).0].concat();
        if vlan != 0 {
            frame.extend([0x81, 0]);
            frame.extend(vlan.to_be_bytes());
        }
        frame.extend([0x88, 0xb5, network as u8]);
        let guest = &self.guests[network][from];
        self.deliver(network, guest.host, guest.port, &frame);
        self.outputs(network);
    }

    fn deliver(&mut self, network: usize, at: usize, from: PortId, frame: &[u8]) {
        let switch = &mut self.switches[at][network];
        let from_host = switch.behind(from) != Some(Behind::Local);
        let to: Vec<PortId> = switch.frame(self.now, from, frame).collect();
        for port in to {
            assert_ne!(port, from, "back to where it came from");
            match self.switches[at][network].behind(port).unwrap() {
                Behind::Local => *self.arrived.entry((network, at, port)).or_default() += 1,
                Behind::Gateway => panic!("no network has a gateway"),
                Behind::Host(other) => {
                    assert!(!from_host, "from a host to a host");
                    let other = usize::from(other.0[0]) - 1;
                    let from = self.switches[other][network].host_port(host(at)).unwrap();
                    self.deliver(network, other, from, frame);
                }
            }
        }
    }

    /// Does what the switches want done.
    fn outputs(&mut self, network: usize) {
        for at in 0..HOSTS {
            while let Some(output) = self.switches[at][network].poll() {
                match output {
                    Output::Redirect { to, redirect } => {
                        let to = usize::from(to.0[0]) - 1;
                        let told = &mut self.switches[to][network];
                        told.redirected(self.now, host(at), redirect);
                    }
                    Output::Announce(announcement) => {
                        for other in (0..HOSTS).filter(|other| *other != at) {
                            if !self.lossy || self.random.below(3) > 0 {
                                let told = &mut self.switches[other][network];
                                told.announced(self.now, host(at), announcement);
                            }
                        }
                    }
                    Output::Flood { except, frame } if !self.lossy => {
                        let switch = &self.switches[at][network];
                        let ports: Vec<PortId> = switch.flood(except).collect();
                        for port in ports {
                            let Some(Behind::Host(other)) = self.switches[at][network].behind(port)
                            else {
                                continue;
                            };
                            let other = usize::from(other.0[0]) - 1;
                            let switch = &mut self.switches[other][network];
                            let from = switch.host_port(host(at)).unwrap();
                            let count = switch.frame(self.now, from, frame.bytes()).count();
                            let local = self.guests[network]
                                .iter()
                                .filter(|guest| guest.host == other);
                            assert_eq!(count, local.count(), "to every guest there");
                        }
                    }
                    Output::Flood { .. } => {}
                    other => panic!("{other:?}"),
                }
            }
        }
    }

    fn copies(&self, network: usize, guest: usize) -> usize {
        let guest = &self.guests[network][guest];
        let key = (network, guest.host, guest.port);
        self.arrived.get(&key).copied().unwrap_or(0)
    }

    /// Every frame to everyone reaches every other guest of the network once, and no other.
    fn broadcast(&mut self, network: usize, from: usize) {
        let vlan = VLANS[self.random.below(VLANS.len())];
        let group = [Mac::BROADCAST, Mac([0x33, 0x33, 0, 0, 0, 9])][self.random.below(2)];
        self.send(network, from, group, vlan);
        for guest in 0..GUESTS {
            assert_eq!(self.copies(network, guest), usize::from(guest != from));
        }
        assert_eq!(self.arrived.len(), GUESTS - 1);
    }

    /// A frame to a guest reaches it once. If its sender's host missed that the guest moved, it is
    /// told, and the frame reaches the guest when it is sent again.
    fn unicast(&mut self, network: usize, from: usize, to: usize) {
        let vlan = VLANS[self.random.below(VLANS.len())];
        let tries = if self.lossy { HOSTS + 2 } else { 1 };
        for _ in 0..tries {
            self.send(network, from, mac(to), vlan);
            assert!(self.arrived.values().all(|copies| *copies == 1));
            assert!(self.arrived.keys().all(|key| key.0 == network));
            if self.copies(network, to) == 1 {
                return;
            }
        }
        panic!("no frame from {from} reaches {to} in VLAN {vlan} of network {network}");
    }

    fn migrate(&mut self, network: usize, guest: usize) {
        let to = self.random.below(HOSTS);
        let Guest {
            host: from,
            port,
            generation,
            pinned,
        } = self.guests[network][guest];
        if to == from {
            return;
        }
        let generation = generation + 1;
        self.guests[network][guest] = self.add(network, to, guest, pinned, generation);
        if pinned {
            let redirect = Redirect {
                mac: mac(guest),
                now_at: host(to),
                generation,
            };
            self.switches[from][network].withdraw(self.now, redirect);
        }
        self.switches[from][network].remove(self.now, port);
        if pinned {
            assert!(self.switches[to][network].announce(mac(guest)));
            self.outputs(network);
        } else {
            // A station that moves by itself is known again when it speaks, in its VLAN.
            for vlan in VLANS {
                self.send(network, guest, Mac::BROADCAST, vlan);
            }
        }
    }

    fn step(&mut self) {
        let network = self.random.below(NETWORKS);
        let guest = self.random.below(GUESTS);
        match self.random.below(20) {
            0 | 1 => self.migrate(network, guest),
            2..=5 => self.broadcast(network, guest),
            6 => {
                // In less than the age of a table in total, where hosts miss announcements.
                let step_ms = if self.lossy { 10 } else { 200_000 };
                self.now += Duration::from_millis(self.random.below(step_ms) as u64);
                for switch in self.switches.iter_mut().flatten() {
                    switch.tick(self.now);
                }
            }
            _ => {
                let to = self.random.below(GUESTS);
                if to != guest {
                    self.unicast(network, guest, to);
                }
            }
        }
    }
}

#[test]
fn frames_arrive_where_the_model_says() {
    for seed in 0..SEEDS {
        let mut world = World::new(seed);
        for step in 0..STEPS {
            let run = std::panic::AssertUnwindSafe(|| world.step());
            if let Err(failure) = std::panic::catch_unwind(run) {
                eprintln!("seed {seed}, step {step}");
                std::panic::resume_unwind(failure);
            }
        }
    }
}
