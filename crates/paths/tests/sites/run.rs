//! One run: the order of events, the faults, and what must hold on the way and in the end.

use crate::model::{Expected, expected, is_prompt};
use crate::nat::Maps;
use crate::net::Target;
use crate::plan::{Fault, Plan};
use crate::random::{Rng, ms};
use crate::variant::Variant;
use crate::world::{Item, Packet, World, server_id};
use longhaul_paths::{Event, Leg, LocalEvent, Obstacle, Route, State, Tuning};
use std::time::Duration;

/// The maximum number of datagrams of one host in a second: probes are paced to 200, 120 are
/// acknowledged, paths that are used and servers are asked.
pub(crate) const RATE_MAX: usize = 340;
/// After the last fault, everything has settled.
const SETTLE: Duration = Duration::from_secs(420);
/// In the last part of it, hosts are quiet.
const QUIET: Duration = Duration::from_secs(100);
/// The maximum number of datagrams of a host in that time: direct, relayed, or where luck decides.
const QUIET_DIRECT: u32 = 170;
const QUIET_RELAYED: u32 = 420;
const QUIET_LUCKY: u32 = 8000;
/// A dead path is replaced within this time, if a relay works.
const REPLACED_WITHIN: Duration = Duration::from_secs(15);
/// How long hosts go on when all servers have died.
const ALONE: Duration = Duration::from_secs(120);
/// Where neither luck, loss nor faults delay it, a pair is direct at this time.
const PROMPT: Duration = Duration::from_secs(5);
const TICK: Duration = Duration::from_millis(1000);

pub(crate) fn run(seed: u64, variant: Variant, traced: bool) -> World {
    let mut rng = Rng(seed);
    let plan = Plan::of(&mut rng);
    run_plan(plan, rng, variant, traced)
}

pub(crate) fn run_plan(plan: Plan, rng: Rng, variant: Variant, traced: bool) -> World {
    let end = plan.last_fault + SETTLE;
    let servers_die = plan.servers_die;
    let mut world = World::new(plan, rng, variant, traced);
    world.run_until(end - QUIET);
    for host in &mut world.hosts {
        host.sent_late = 0;
    }
    world.run_until(end);
    world.check_end();
    if servers_die && world.failure.is_none() {
        world.fault(Fault::AllServersDie);
        world.run_until(end + ALONE);
        world.check_alone();
    }
    world
}

impl World {
    fn run_until(&mut self, end: Duration) {
        while self.failure.is_none()
            && let Some(item) = self.next()
        {
            if self.now >= end {
                self.at(self.now, item);
                return;
            }
            self.happen(item);
        }
    }

    fn happen(&mut self, item: Item) {
        match item {
            Item::Wake(host) => self.wake(host),
            Item::Datagram(host, keys, on, packet) => {
                if keys == [self.hosts[0].agent, self.hosts[1].agent] {
                    self.datagram(host, on, packet);
                }
            }
            Item::Transit(sender, keys, transit, packet) => {
                // Sealed for the other host: nobody else can read it.
                let passed = self.net.arrive(transit, self.now, true);
                if let Some((Target::Host(host, socket), address)) = passed
                    && host != sender
                    && keys == [self.hosts[0].agent, self.hosts[1].agent]
                {
                    self.datagram(host, Route::Direct { socket, address }, packet);
                }
            }
            Item::Message(host, message) => self.tell(host, Event::Message(*message)),
            Item::Answer(host, agent, id, from, mapped) => {
                if agent == self.hosts[host].agent {
                    self.tell_local(host, LocalEvent::Observed { id, from, mapped });
                }
            }
            Item::Tcp(host, agent, server, open) => {
                if agent == self.hosts[host].agent {
                    let open = open && self.servers[server].alive;
                    self.hosts[host].tcp[server] = open;
                    let server = server_id(server);
                    self.tell_local(host, LocalEvent::Tcp { server, open });
                }
            }
            Item::Sockets(host, agent, sockets) => {
                if agent == self.hosts[host].agent {
                    self.tell(host, Event::Sockets(sockets));
                }
            }
            Item::Fault(fault) => self.fault(fault),
            Item::Tick => {
                self.register();
                self.check();
                self.at(self.now + TICK, Item::Tick);
            }
            Item::Data(host) => self.data(host),
        }
    }

    fn datagram(&mut self, host: usize, on: Route, packet: Packet) {
        match packet {
            Packet::Data => {
                let it = &mut self.hosts[host];
                it.paths.received(on, &it.local, self.now);
                self.act(host);
            }
            Packet::Probe(id) => {
                if self.variant == Variant::NoPeerReflexive && on.is_direct() {
                    let known = self.hosts[host].probes.values().any(|probed| *probed == on);
                    if !known {
                        return;
                    }
                }
                self.tell(host, Event::Probe { id, on });
            }
            Packet::Ack(id, observed) => {
                let captured = self.now < self.hosts[host].replay_until && self.rng.one_in(2);
                let mut on = on;
                if let (true, Route::Direct { socket, .. }) = (captured, on) {
                    let address = ([198, 51, 100, 66], 666).into();
                    on = Route::Direct { socket, address };
                }
                let it = &mut self.hosts[host];
                let probed = it.probes.get(&id).copied();
                if probed == Some(on) {
                    *it.acks.entry(on).or_default() += 1;
                }
                if self.variant == Variant::AnyAcknowledgement {
                    on = probed.unwrap_or(on);
                }
                self.tell(host, Event::Ack { id, on, observed });
            }
        }
    }

    fn data(&mut self, host: usize) {
        if self.now >= self.hosts[host].data_until {
            return;
        }
        if let Some(used) = self.hosts[host].used {
            self.hosts[host].paths.sent(used, self.now);
            self.send(host, used, Packet::Data);
            self.act(host);
        }
        self.at(self.now + ms(200), Item::Data(host));
    }

    /// Soft state: hosts register again where they are not known, and learn of each other.
    fn register(&mut self) {
        for server in 0..self.servers.len() {
            let id = server_id(server);
            for host in 0..2 {
                let leg = self.hosts[host].local.leg(id).is_some();
                let alive = self.servers[server].alive;
                if leg && alive {
                    self.servers[server].registered[host] = true;
                }
                let attached = leg && alive && self.servers[server].registered[host];
                let known = self.hosts[host].attached[server];
                // A host does not hear that a server died; it misses its answers.
                if attached != known && (attached || !leg) {
                    self.hosts[host].attached[server] = attached;
                    self.tell_local(
                        host,
                        LocalEvent::Attached {
                            server: id,
                            attached,
                        },
                    );
                }
            }
            for host in 0..2 {
                let present = self.servers[server].registered == [true; 2];
                let hears = self.servers[server].alive && self.hosts[host].attached[server];
                if hears && present != self.hosts[host].told_present[server] {
                    self.hosts[host].told_present[server] = present;
                    self.tell(
                        host,
                        Event::Present {
                            server: id,
                            present,
                        },
                    );
                }
            }
        }
    }

    pub(crate) fn fault(&mut self, fault: Fault) {
        self.note(|| format!("{fault:?}"));
        match fault {
            Fault::ServerDies(server) => self.kill(server),
            Fault::ServerReturns(server) => self.servers[server].alive = true,
            Fault::AllServersDie => {
                (0..self.servers.len()).for_each(|server| self.kill(server));
            }
            Fault::Overload(server, seconds) => {
                let wait = Duration::from_secs(seconds);
                self.servers[server].overloaded_until = self.now + wait;
                for host in 0..2 {
                    let server = server_id(server);
                    self.tell_local(host, LocalEvent::Refused { server, wait });
                }
            }
            Fault::NatReboot(nat) => {
                if let Some(nat) = self.net.nats.get_mut(nat) {
                    nat.reboot(&mut self.rng);
                }
            }
            Fault::Move(host, site) => {
                self.net.attach(host, site, &self.plan);
                for server in 0..self.servers.len() {
                    if std::mem::take(&mut self.hosts[host].tcp[server]) {
                        let server = server_id(server);
                        self.tell_local(
                            host,
                            LocalEvent::Tcp {
                                server,
                                open: false,
                            },
                        );
                    }
                }
                let addresses = self.net.places[host].addresses();
                self.tell_local(host, LocalEvent::Addresses(addresses));
            }
            Fault::Restart(host) => self.restart(host),
            Fault::DirectCut(seconds) => self.cut_until = self.now + Duration::from_secs(seconds),
            Fault::Traffic(who, seconds) => {
                for host in [0, 1].into_iter().filter(|host| who >> host & 1 == 1) {
                    self.hosts[host].data_until = self.now + Duration::from_secs(seconds);
                    self.at(self.now, Item::Data(host));
                }
            }
            Fault::Replay(host) => self.hosts[host].replay_until = self.now + ms(3000),
        }
    }

    fn kill(&mut self, server: usize) {
        self.servers[server].alive = false;
        self.servers[server].registered = [false; 2];
        for host in 0..2 {
            if self.hosts[host].tcp[server] {
                let agent = self.hosts[host].agent;
                self.at(self.now + ms(1000), Item::Tcp(host, agent, server, false));
            }
        }
    }

    // What must hold on the way.

    pub(crate) fn used(&mut self, host: usize, used: Option<Route>) {
        let before = self.hosts[host].used;
        let cut_lately = self.now < self.cut_until + REPLACED_WITHIN;
        let restarted = self.restarted_at;
        let restarted = restarted.is_some_and(|at| self.now < at + REPLACED_WITHIN);
        let captured = self.now < self.hosts[host].replay_until + REPLACED_WITHIN;
        if let Some(route) = before.filter(Route::is_direct)
            && used.is_none_or(|used| !used.is_direct())
            && !cut_lately
            && !captured
            && !restarted
            && self.works(host, route)
        {
            self.hosts[host].demotions += 1;
            self.note(|| format!("{host}: a path that works was given up"));
        }
        let it = &mut self.hosts[host];
        it.used = used;
        it.changes += 1;
        let limit = 12 + 8 * self.plan.faults.len() as u32;
        let (changes, demotions) = (it.changes, it.demotions);
        let needed = Tuning::default().promote_acks;
        let unproved = used
            .filter(Route::is_direct)
            .filter(|used| it.acks.get(used).copied().unwrap_or_default() < needed);
        if let Some(used) = unproved {
            self.fail(&format!("host {host} uses {used} without acknowledgements"));
        }
        if changes > limit {
            self.fail(&format!("host {host} changes its path again and again"));
        }
        if demotions > 1 {
            self.fail(&format!("host {host} gives up paths that work"));
        }
    }

    fn check(&mut self) {
        let calm = self.plan.faults.is_empty() && self.plan.loss_permille == 0;
        let attacked = self
            .hosts
            .iter()
            .any(|host| host.replay_until > Duration::ZERO);
        let now = self.now >= PROMPT && self.now < PROMPT + TICK;
        if now && calm && !attacked && is_prompt(&self.plan, self.plan.at) {
            let direct = |host: &crate::world::Host| host.used.is_some_and(|used| used.is_direct());
            if !self.hosts.iter().all(direct) {
                self.fail("a pair that needs no luck is not direct yet");
            }
        }
        for server in 0..self.servers.len() {
            let id = server_id(server);
            let route = Route::Relayed { server: id };
            let usable = self
                .hosts
                .iter()
                .all(|host| host.local.is_usable(id, self.now) && host.told_present[server]);
            let ok = usable && self.works(0, route);
            let since = self.servers[server].ok_since;
            self.servers[server].ok_since = ok.then(|| since.unwrap_or(self.now));
        }
        let relay = self
            .servers
            .iter()
            .filter_map(|server| server.ok_since)
            .min();
        for host in 0..2 {
            let works = match self.hosts[host].used {
                Some(used) => self.works(host, used),
                None => false,
            };
            let since = self.hosts[host].broken_since;
            let since = (!works).then(|| since.unwrap_or(self.now));
            self.hosts[host].broken_since = since;
            if let (Some(since), Some(relay)) = (since, relay)
                && self.now > since.max(relay) + REPLACED_WITHIN
            {
                let used = self.hosts[host].used;
                self.fail(&format!("host {host} uses {used:?}, which does not work"));
            }
        }
    }

    // What must hold in the end.

    fn check_end(&mut self) {
        if self.failure.is_some() {
            return;
        }
        let at = [0, 1].map(|host| self.net.places[host].site);
        let wanted = expected(&self.plan, at);
        for host in 0..2 {
            let it = &self.hosts[host];
            let why = it.paths.why(&it.local).to_string();
            let direct = it.used.map(|used| used.is_direct());
            let right = match wanted {
                Expected::Direct => direct == Some(true),
                Expected::Relayed => direct == Some(false),
                Expected::Either => direct.is_some(),
            };
            if !right {
                return self.fail(&format!("host {host} must be {wanted:?}, but is {why}"));
            }
            let limit = match (wanted, direct) {
                (Expected::Either, _) => QUIET_LUCKY,
                (_, Some(true)) => QUIET_DIRECT,
                _ => QUIET_RELAYED,
            };
            // With much loss a path is given up now and then, and found again.
            let demoted = self.hosts.iter().any(|host| host.demotions > 0);
            if it.sent_late > limit && !demoted {
                let text = format!(
                    "host {host} is not quiet: {} datagrams, {why}",
                    it.sent_late
                );
                return self.fail(&text);
            }
            let open = self.net.places[host].sockets.len() - 1;
            let lucky = wanted == Expected::Either && direct == Some(false);
            if open > it.paths.sockets().len() || open > 3 && !lucky {
                return self.fail(&format!("host {host} has {open} sockets open"));
            }
            if let Some(Route::Relayed { server }) = it.used {
                let blocked = self.net.blocked[at[host]];
                let leg = if blocked { Leg::Tcp } else { Leg::Udp };
                if it.local.leg(server) != Some(leg) {
                    return self.fail(&format!("host {host} reaches the relay in a wrong way"));
                }
            }
            if let State::Relayed { obstacle, .. } = it.paths.why(&it.local).state
                && self.are_symmetric(at)
                && !at
                    .iter()
                    .all(|site| self.plan.sites[*site].is_behind_carrier())
                && wanted == Expected::Relayed
                && obstacle != Obstacle::BothDependent
            {
                return self.fail(&format!("host {host} gives a wrong reason: {why}"));
            }
            let used = it.used;
            if used.is_some_and(|used| !self.works(host, used)) {
                return self.fail(&format!(
                    "host {host} uses a path that does not work: {why}"
                ));
            }
        }
    }

    fn are_symmetric(&self, at: [usize; 2]) -> bool {
        at.into_iter().all(|site| {
            let site = &self.plan.sites[site];
            let dependent =
                |nat: &crate::nat::Spec| nat.maps == Maps::DependentRandom && !nat.blocks_udp;
            site.ipv4 && !site.ipv6 && site.nat.as_ref().is_some_and(dependent)
        })
    }

    /// All servers are gone: direct paths go on, what is relayed waits and says so.
    fn check_alone(&mut self) {
        for host in 0..2 {
            let it = &self.hosts[host];
            let at = [0, 1].map(|host| self.net.places[host].site);
            let why = it.paths.why(&it.local);
            let right = match expected(&self.plan, at) {
                Expected::Direct => matches!(why.state, State::Direct { .. }),
                Expected::Relayed => why.state == State::NoServer,
                Expected::Either => true,
            };
            if !right {
                return self.fail(&format!("host {host} without servers: {why}"));
            }
        }
    }
}
