//! Measures networks of a realm between emulated sites, by agents: a relayed path, members that
//! are idle, and what clients see of a guest that moves (paper 004, figures 9 and 10, table V).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::ground::Busy;
use crate::bench::Options;
use crate::bench::document::{AskedLink, Document, Sense, median};
use crate::bench::iperf3::{self, Way};
use crate::measure::cpu_s;
use longhaul_lab::agent::Agent;
use longhaul_lab::arena::Arena;
use longhaul_lab::clients::{Client, Loop, download, requests};
use longhaul_lab::error::{During, LabError};
use longhaul_lab::guest::{CHANNEL_NAME, KernelFiles, Tiny, network};
use longhaul_lab::internet::access::ParseAccessError;
use longhaul_lab::internet::{SitePlan, SitesPlan};
use longhaul_lab::interrupt;
use longhaul_lab::lab::{Host, Lab};
use longhaul_lab::link::spec::LinkSpec;
use longhaul_lab::process::wait_until;
use longhaul_lab::product::{Finished, Product, Settings, channel_socket};
use longhaul_lab::realm::{Realm, path_to, paths_of};

/// A path through a rendezvous server.
const RELAYED: &str = "relayed";
/// Members of a network that send nothing.
const IDLE: &str = "idle_members";
/// What clients of a guest see of its move.
const SERVICE: &str = "service";
/// How long moves take, by memory and link.
const MOVES: &str = "move_times";
/// The cases.
pub(super) const CASES: [&str; 4] = [RELAYED, IDLE, SERVICE, MOVES];

/// The uplinks: two sites are both apart.
/// Two of them and the relay's, twice, are between two hosts: the queues hold one round trip.
const RELAYED_UPLINK: &str = "100mbit,10ms,queue=40ms";
const IDLE_UPLINK: &str = "2gbit,1ms";
const SERVICE_UPLINK: &str = "100mbit,10ms";
const MOVES_UPLINKS: [&str; 3] = ["100mbit,10ms", "50mbit,30ms", "20mbit,50ms"];
/// The memory of guests whose moves are timed, in MiB.
const MEMORY_MIB: [u64; 3] = [128, 256, 512];
/// Hosts of sites beside the two that are measured.
const IDLE_SITES: [&str; 4] = ["4*none", "4*none", "4*none", "4*none"];
const IDLE_HOSTS: u32 = 16;
/// The network of the hosts beside the two, while they are no members of the two's.
const ELSEWHERE: &str = "elsewhere";
/// How long hosts are left alone before they count as idle: they look for better paths and for the
/// MTU meanwhile.
const SETTLED: Duration = Duration::from_secs(10);
/// The addresses of hosts in a network.
const ADDRESSES: [&str; 2] = ["10.78.0.11", "10.78.0.12"];
/// The steps of paper 004's figures.
const STEP: Duration = Duration::from_millis(500);
/// How long a service is watched before and after a move.
const AROUND: Duration = Duration::from_secs(5);
/// How long hosts have to find the expected path.
const PATH_LIMIT: Duration = Duration::from_secs(120);
const BOOT_LIMIT: Duration = Duration::from_secs(120);
const MOVE_LIMIT: Duration = Duration::from_secs(600);
/// The bars.
const RELAYED_SHARE: f64 = 0.8;
const IDLE_SHARE: f64 = 0.98;
const IDLE_CPU: f64 = 1.02;
/// The longest gap, beyond the downtime and a round trip.
const GAP_BEYOND_MS: f64 = 50.0;

/// A throughput between two hosts.
#[derive(Debug, Clone, Serialize)]
struct ThroughputRow {
    system: &'static str,
    case: &'static str,
    /// The uplink of each site.
    link: AskedLink,
    repeat: u32,
    outcome: String,
    /// Members of the network that send nothing.
    idle_members: u32,
    /// Hosts that send nothing and keep paths to each other: these members, or members of another
    /// network.
    idle_hosts: u32,
    /// `direct` or `relayed`.
    connected: Option<String>,
    way: Way,
    congestion: &'static str,
    throughput_bps: f64,
    /// Of the whole machine.
    cpu_s_per_gb: f64,
    /// Of the agents on the two hosts.
    agents_cpu_s: f64,
    agents_cpu_s_per_gb: f64,
    /// Of the agents on all other hosts, during the transfer.
    other_agents_cpu_s: f64,
}

/// What hosts beside the two do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Idle {
    /// They are in no realm.
    Nobody,
    /// They are members of another network: they pay for their paths to each other.
    Elsewhere,
    /// They are members of the network of the two.
    Members,
}

/// Throughputs, and the two agents' processor time for a gigabyte, by what other hosts do.
#[derive(Debug, Default)]
struct Found {
    throughput_bps: BTreeMap<Idle, Vec<f64>>,
    agents_cpu_s_per_gb: BTreeMap<Idle, Vec<f64>>,
}

impl Found {
    fn add(&mut self, idle: Idle, row: &ThroughputRow) {
        let (throughputs, cpu) = (&mut self.throughput_bps, &mut self.agents_cpu_s_per_gb);
        throughputs
            .entry(idle)
            .or_default()
            .push(row.throughput_bps);
        cpu.entry(idle).or_default().push(row.agents_cpu_s_per_gb);
    }

    fn judge(&self, document: &mut Document) {
        let share = |of: &BTreeMap<Idle, Vec<f64>>, without: Idle| {
            let median = |idle: Idle| median(of.get(&idle).into_iter().flatten().copied());
            let both = median(Idle::Members).zip(median(without));
            both.map(|(with, without)| with / without)
        };
        for (name, of, without, sense, bar) in [
            (
                "throughput_with_idle_members",
                &self.throughput_bps,
                Idle::Nobody,
                Sense::AtLeast,
                IDLE_SHARE,
            ),
            (
                "throughput_with_idle_peers",
                &self.throughput_bps,
                Idle::Elsewhere,
                Sense::AtLeast,
                IDLE_SHARE,
            ),
            (
                "agents_cpu_with_idle_peers",
                &self.agents_cpu_s_per_gb,
                Idle::Elsewhere,
                Sense::AtMost,
                IDLE_CPU,
            ),
        ] {
            document.add_check(name, share(of, without), sense, bar);
        }
    }
}

/// What a client saw of a guest that moved.
#[derive(Debug, Clone, Serialize)]
struct ServiceRow {
    system: &'static str,
    case: &'static str,
    link: AskedLink,
    repeat: u32,
    outcome: String,
    /// `download` (bytes) or `requests` (answers).
    workload: &'static str,
    connected: Option<String>,
    step_ms: u64,
    /// The move, from the beginning of the first step.
    move_began_ms: f64,
    move_ended_ms: f64,
    /// By the source's report.
    downtime_ms: Option<f64>,
    longest_gap_ms: Option<f64>,
    round_trip_ms: f64,
    /// Bytes or answers per second, of each step.
    per_s: Vec<f64>,
    before_per_s: f64,
    during_per_s: f64,
    after_per_s: f64,
}

/// The time of a move.
#[derive(Debug, Clone, Serialize)]
struct MoveRow {
    system: &'static str,
    case: &'static str,
    link: AskedLink,
    repeat: u32,
    outcome: String,
    connected: Option<String>,
    memory_mib: u64,
    total_ms: f64,
    downtime_ms: Option<f64>,
    link_bytes: Option<u64>,
}

/// Sites, an agent on each host, and a realm with those that joined.
struct Sites {
    realm: Realm,
    product: Product,
    lab: Lab,
    uplink: LinkSpec,
    /// The number of guests so far: each has a name of its own, since a guest that has moved away
    /// is not started again.
    guests: u32,
}

/// A case that could not be measured to its end.
#[derive(Debug, Clone, Serialize)]
struct FailedRow {
    system: &'static str,
    case: &'static str,
    outcome: String,
}

/// Measures the cases that are asked for. A case that cannot be measured is a failed row, and the
/// others go on.
pub(super) fn measure(options: &Options, document: &mut Document) -> Result<(), LabError> {
    let bench = Bench { options };
    let mut failed = 0_u32;
    let mut asked = CASES
        .into_iter()
        .filter(|case| options.wants_workload(case))
        .peekable();
    if asked.peek().is_none() {
        return Ok(());
    }
    for case in asked {
        let measured = match case {
            RELAYED => bench.relayed(document),
            IDLE => bench.idle(document),
            SERVICE => bench.service(document),
            _ => bench.moves(document),
        };
        if let Err(error) = measured {
            interrupt::check()?;
            failed += 1;
            let row = FailedRow {
                system: "longhaul",
                case,
                outcome: format!("failed: {error}"),
            };
            document.add_row(&row, &format!("{case:<16} {}", row.outcome));
        }
    }
    let (name, failed) = ("failed_cases_of_sites", Some(f64::from(failed)));
    document.add_check(name, failed, Sense::AtMost, 0.0);
    Ok(())
}

struct Bench<'a> {
    options: &'a Options,
}

impl Bench<'_> {
    fn time(&self) -> Duration {
        Duration::from_secs(if self.options.quick { 5 } else { 10 })
    }

    fn uplink(&self, own: &str) -> Result<LinkSpec, LabError> {
        match self.options.link {
            Some(link) => Ok(link),
            None => own
                .parse()
                .map_err(|error| LabError::Which(format!("{error}"))),
        }
    }

    /// A path through a rendezvous server, between symmetric NATs.
    fn relayed(&self, document: &mut Document) -> Result<(), LabError> {
        let uplink = self.uplink(RELAYED_UPLINK)?;
        let sites = Sites::create(RELAYED, &["symmetric", "symmetric"], uplink, self.options)?;
        let agents = sites.agents(0..2)?;
        sites.realm.join(&sites.lab, &agents)?;
        sites.open(network::NETWORK, &agents, "relayed")?;
        let internet = sites.lab.internet()?;
        let link_bps = internet.measure_uplink(internet.site(0)?)?.rate_bps;
        for congestion in ["bbr", "cubic"] {
            let mut shares = Vec::new();
            for repeat in 1..=self.options.repeats() {
                let row =
                    sites.throughput((RELAYED, congestion), (Idle::Nobody, repeat), self.time())?;
                shares.push(row.throughput_bps / link_bps);
                document.add_row(&row, &row.show());
            }
            let name = format!("relayed_share_of_link.{congestion}");
            document.add_check(&name, median(shares), Sense::AtLeast, RELAYED_SHARE);
        }
        Ok(())
    }

    /// A throughput without other hosts, beside other hosts, with them as idle members, and without
    /// them again.
    fn idle(&self, document: &mut Document) -> Result<(), LabError> {
        let uplink = self.uplink(IDLE_UPLINK)?;
        let all = [&["none", "none"][..], &IDLE_SITES].concat();
        let sites = Sites::create(IDLE, &all, uplink, self.options)?;
        let both = sites.agents(0..2)?;
        sites.realm.join(&sites.lab, &both)?;
        sites.open(network::NETWORK, &both, "direct")?;
        let mut found = Found::default();
        let repeats = self.options.repeats().max(2);
        let mut measure = |idle: Idle, repeat: u32, document: &mut Document| {
            interrupt::sleep(SETTLED)?;
            let row = sites.throughput((IDLE, "cubic"), (idle, repeat), self.time())?;
            document.add_row(&row, &row.show());
            found.add(idle, &row);
            Ok::<_, LabError>(())
        };
        for repeat in 1..=repeats {
            measure(Idle::Nobody, repeat, document)?;
        }
        let others = sites.agents(2..2 + IDLE_HOSTS as usize)?;
        let everyone = [&both[..], &others].concat();
        sites.realm.join(&sites.lab, &others)?;
        sites.realm.create_network(&sites.lab, ELSEWHERE, &others)?;
        for repeat in 1..=repeats {
            for (idle, members) in [(Idle::Elsewhere, &both), (Idle::Members, &everyone)] {
                let named = network::NETWORK;
                sites.realm.set_members(&sites.lab, named, members)?;
                sites.meshed(&[members, &others])?;
                measure(idle, repeat, document)?;
            }
        }
        for other in &others {
            sites
                .realm
                .operate(&sites.lab, &["host", "remove", other.name()])?;
        }
        sites.realm.publish(&sites.lab)?;
        sites.meshed(&[&both])?;
        for repeat in 1..=repeats {
            measure(Idle::Nobody, repeat, document)?;
        }
        found.judge(document);
        Ok(())
    }

    /// What clients at a third site see of a guest that moves between sites behind NATs.
    fn service(&self, document: &mut Document) -> Result<(), LabError> {
        let uplink = self.uplink(SERVICE_UPLINK)?;
        let mut sites = Sites::with_clients(SERVICE, uplink, self.options)?;
        let mut beyond = Vec::new();
        let mut broken = 0_u32;
        let mut host = 0;
        sites.boot(256)?;
        for repeat in 1..=self.options.repeats() {
            for (workload, client) in [("download", download as Loop), ("requests", requests)] {
                let row = sites.watched((workload, client), (host, 1 - host), repeat)?;
                document.add_row(&row, &row.show());
                if row.outcome == "completed" {
                    host = 1 - host;
                    let gap = row.longest_gap_ms.zip(row.downtime_ms);
                    let gap = gap.map(|(gap, downtime)| gap - downtime - row.round_trip_ms);
                    // Between two answers there is always a connection that is made.
                    beyond.extend(gap.filter(|_| workload == "download"));
                } else {
                    broken += 1;
                }
            }
        }
        sites.end();
        let (name, beyond) = ("gap_beyond_downtime_ms", median(beyond));
        document.add_check(name, beyond, Sense::AtMost, GAP_BEYOND_MS);
        document.add_check(
            "broken_services",
            Some(f64::from(broken)),
            Sense::AtMost,
            0.0,
        );
        Ok(())
    }

    /// The time of moves of an idle guest, by memory and link.
    fn moves(&self, document: &mut Document) -> Result<(), LabError> {
        let quick = self.options.quick;
        let uplinks = match self.options.link {
            Some(_) => vec![self.uplink(RELAYED_UPLINK)?],
            None => {
                let own = MOVES_UPLINKS.iter().take(if quick { 1 } else { 3 });
                own.map(|own| self.uplink(own)).collect::<Result<_, _>>()?
            }
        };
        for uplink in uplinks {
            let mut sites = Sites::with_clients(MOVES, uplink, self.options)?;
            for memory_mib in MEMORY_MIB.into_iter().take(if quick { 2 } else { 3 }) {
                for repeat in 1..=self.options.repeats() {
                    sites.boot(memory_mib)?;
                    let finished = sites.move_guest((0, 1))?;
                    sites.end();
                    let row = sites.timed(&finished, memory_mib, repeat)?;
                    document.add_row(&row, &row.show());
                }
            }
        }
        Ok(())
    }
}

impl Sites {
    fn create(
        purpose: &str,
        sites: &[&str],
        uplink: LinkSpec,
        options: &Options,
    ) -> Result<Self, LabError> {
        let site = |access: &&str| {
            let access = access.parse();
            let access =
                access.map_err(|error: ParseAccessError| LabError::Which(error.to_string()))?;
            Ok(SitePlan { access, uplink })
        };
        let plan = SitesPlan {
            purpose: format!("bench network {purpose}"),
            sites: sites.iter().map(site).collect::<Result<_, LabError>>()?,
            servers: 1,
            backbone: uplink,
            seed: options.seed,
        };
        let mut lab = Lab::create_sites(&plan)?;
        let files = KernelFiles::make(lab.host(0)?.folder())?;
        let settings = Settings {
            qemus: vec![options.qemu.clone()],
            accelerator: "auto".to_owned(),
        };
        let product = Product::start(&mut lab, &files, &settings)?;
        let realm = Realm::create(&lab)?;
        Ok(Self {
            realm,
            product,
            lab,
            uplink,
            guests: 0,
        })
    }

    /// Returns the name of the newest guest.
    fn guest(&self) -> String {
        format!("web-{}", self.guests)
    }

    /// Creates two sites behind NATs, and a third with clients of the guests' network.
    fn with_clients(purpose: &str, uplink: LinkSpec, options: &Options) -> Result<Self, LabError> {
        let access = ["port-restricted", "port-restricted", "none"];
        let mut sites = Self::create(purpose, &access, uplink, options)?;
        let agents = sites.agents(0..3)?;
        sites.realm.join(&sites.lab, &agents)?;
        sites.open(network::NETWORK, &agents, "direct")?;
        let bridge = sites.realm.bridge(agents[2], network::NETWORK)?;
        sites.lab.add_clients_at(2, &bridge)?;
        Ok(sites)
    }

    fn agents(&self, hosts: std::ops::Range<usize>) -> Result<Vec<&Agent>, LabError> {
        hosts.map(|host| self.product.agent(host)).collect()
    }

    /// Makes a network of these hosts, in which the first two have addresses.
    fn open(&self, name: &str, agents: &[&Agent], kind: &str) -> Result<(), LabError> {
        self.realm.create_network(&self.lab, name, agents)?;
        for (host, address) in ADDRESSES.iter().enumerate() {
            let bridge = self.realm.bridge(agents[host], name)?;
            self.lab.host(host)?.namespace().configure(&format!(
                "link add inside type veth peer name inside-port\n\
                 link set dev inside-port master {bridge} up\n\
                 link set dev inside up\n\
                 addr add {address}/24 dev inside\n"
            ))?;
        }
        self.connected(agents, kind)
    }

    /// Waits until the hosts of each group reach each other directly, and no others.
    fn meshed(&self, groups: &[&[&Agent]]) -> Result<(), LabError> {
        let mut wanted: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for group in groups {
            let names = || group.iter().map(|agent| agent.name());
            for name in names() {
                let others = names().filter(|other| *other != name);
                wanted.entry(name).or_default().extend(others);
            }
        }
        let agents = groups.iter().copied().flatten();
        for agent in agents {
            let wanted = &wanted[agent.name()];
            let mut said = String::new();
            let meshed = wait_until(PATH_LIMIT, || {
                let paths = paths_of(agent).unwrap_or_default();
                said = format!("{}: {paths:?}", agent.name());
                paths.len() == wanted.len()
                    && wanted
                        .iter()
                        .all(|name| paths.get(*name).is_some_and(|kind| kind == "direct"))
            });
            if !meshed {
                return Err(LabError::Answer {
                    what: format!("hosts that are to reach {} others directly", wanted.len()),
                    message: said,
                });
            }
        }
        Ok(())
    }

    /// Returns the processor time of the agents on these hosts so far, in seconds.
    fn agents_cpu_s(&self, hosts: std::ops::Range<usize>) -> Result<f64, LabError> {
        let agents = self.agents(hosts)?;
        let each = agents.iter().map(|agent| {
            let gone = || LabError::Which(format!("the agent on {} has ended", agent.name()));
            cpu_s(agent.pid()).ok_or_else(gone)
        });
        each.sum()
    }

    /// Waits until the first host reaches these in this way.
    fn connected(&self, agents: &[&Agent], kind: &str) -> Result<(), LabError> {
        let from = self.product.agent(0)?;
        let mut said = String::new();
        let others = || agents.iter().filter(|agent| agent.name() != from.name());
        let reached = wait_until(PATH_LIMIT, || {
            others().all(|to| match path_to(from, to.name()) {
                Ok((is, text)) => {
                    said = format!("{}: {text}", to.name());
                    is.as_deref() == Some(kind)
                }
                Err(_) => false,
            })
        });
        match reached {
            true => Ok(()),
            false => Err(LabError::Answer {
                what: format!("hosts that are to be connected: {kind}"),
                message: said,
            }),
        }
    }

    fn way(&self) -> Result<Option<String>, LabError> {
        let to = self.product.agent(1)?.name();
        Ok(path_to(self.product.agent(0)?, to)?.0)
    }

    fn throughput(
        &self,
        (case, congestion): (&'static str, &'static str),
        (idle, repeat): (Idle, u32),
        time: Duration,
    ) -> Result<ThroughputRow, LabError> {
        interrupt::check()?;
        let hosts: [&Host; 2] = [self.lab.host(0)?, self.lab.host(1)?];
        let all = self.lab.hosts().len();
        let agents = || Ok::<_, LabError>([self.agents_cpu_s(0..2)?, self.agents_cpu_s(2..all)?]);
        let (busy, before) = (Busy::now()?, agents()?);
        let transfer = iperf3::transfer(hosts, ADDRESSES[1], congestion, Way::Forth, time)?;
        let (busy_s, after) = (busy.elapsed_s()?, agents()?);
        let gb = transfer.bps * time.as_secs_f64() / 8e9;
        let agents_cpu_s = after[0] - before[0];
        Ok(ThroughputRow {
            system: "longhaul",
            case,
            link: self.uplink.into(),
            repeat,
            outcome: "completed".to_owned(),
            idle_members: if idle == Idle::Members { IDLE_HOSTS } else { 0 },
            idle_hosts: if idle == Idle::Nobody { 0 } else { IDLE_HOSTS },
            connected: self.way()?,
            way: Way::Forth,
            congestion,
            throughput_bps: transfer.bps,
            cpu_s_per_gb: busy_s / gb,
            agents_cpu_s,
            agents_cpu_s_per_gb: agents_cpu_s / gb,
            other_agents_cpu_s: after[1] - before[1],
        })
    }

    /// Boots a guest of this memory on the first host, in the network.
    fn boot(&mut self, memory_mib: u64) -> Result<(), LabError> {
        self.guests += 1;
        let mut guest = Tiny::calm(&self.guest());
        guest.machine_version = "10.0".to_owned();
        guest.memory_mib = memory_mib;
        guest.serves_clients = true;
        let arena = Arena::new();
        let socket = channel_socket(self.lab.host(0)?, &self.guest(), CHANNEL_NAME);
        arena
            .attach(&socket)
            .during(|| "listen to the guest".to_owned())?;
        self.product
            .start_guest(&self.lab, 0, &guest.description())?;
        let beat = arena.wait_for_beat(BOOT_LIMIT);
        beat.map(drop)
            .map_err(|error| LabError::Which(error.to_string()))
    }

    /// Ends the guest, on either host.
    fn end(&self) {
        for host in 0..2 {
            // One of them does not have it.
            let _ = self.product.stop_guest(host, &self.guest());
        }
    }

    fn move_guest(&self, (from, to): (usize, usize)) -> Result<Finished, LabError> {
        let target = self.lab.host(to)?;
        self.product
            .migrate_within(from, &self.guest(), target, &[], MOVE_LIMIT)
    }

    /// Moves the guest while a client uses it.
    fn watched(
        &self,
        (workload, client): (&'static str, Loop),
        (from, to): (usize, usize),
        repeat: u32,
    ) -> Result<ServiceRow, LabError> {
        let client = Client::start(self.lab.clients()?, client)?;
        wait_until(BOOT_LIMIT, || client.has_ended() || client.answers() > 10);
        let counted = || match workload {
            "download" => client.bytes(),
            _ => client.answers(),
        };
        let (over, began) = (AtomicBool::new(false), Instant::now());
        let (per_s, moved) = thread::scope(|scope| {
            let steps = scope.spawn(|| steps(&over, began, &counted));
            let moved = interrupt::sleep(AROUND)
                .and_then(|()| self.move_guest((from, to)))
                .and_then(|finished| interrupt::sleep(AROUND).map(|()| finished));
            over.store(true, Ordering::Relaxed);
            (steps.join().unwrap_or_default(), moved)
        });
        let finished = moved?;
        let at = |time: Instant| time.saturating_duration_since(began);
        let [first, last] = [at(finished.began), at(finished.ended)];
        let mean = |from: Duration, to: Duration| {
            let index = |time: Duration| (time.as_millis() / STEP.as_millis()) as usize;
            let steps = per_s.iter().take(index(to)).skip(index(from));
            let (sum, count) = steps.fold((0.0, 0), |(sum, count), one| (sum + one, count + 1));
            sum / f64::from(count.max(1))
        };
        let end = STEP * per_s.len() as u32;
        let (before_per_s, during_per_s, after_per_s) = (
            mean(Duration::ZERO, first),
            mean(first, last),
            mean(last, end),
        );
        let seen = client.finish();
        let outcome = match (&seen, finished.completed()) {
            (_, false) => format!("failed: {}", finished.why()),
            (Err(error), true) => format!("failed: the client's connection broke: {error}"),
            (Ok(_), true) => "completed".to_owned(),
        };
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let report = finished.report.as_deref();
        Ok(ServiceRow {
            system: "longhaul",
            case: SERVICE,
            link: self.uplink.into(),
            repeat,
            outcome,
            workload,
            connected: self.way()?,
            step_ms: STEP.as_millis() as u64,
            move_began_ms: ms(first),
            move_ended_ms: ms(last),
            downtime_ms: report.and_then(|report| report.downtime_ms),
            longest_gap_ms: seen.ok().map(|seen| ms(seen.longest_gap)),
            round_trip_ms: ms(2 * self.uplink.rtt),
            per_s,
            before_per_s,
            during_per_s,
            after_per_s,
        })
    }

    fn timed(
        &self,
        finished: &Finished,
        memory_mib: u64,
        repeat: u32,
    ) -> Result<MoveRow, LabError> {
        let report = finished.report.as_deref();
        let total = finished.ended.saturating_duration_since(finished.began);
        Ok(MoveRow {
            system: "longhaul",
            case: MOVES,
            link: self.uplink.into(),
            repeat,
            outcome: match finished.completed() {
                true => "completed".to_owned(),
                false => format!("failed: {}", finished.why()),
            },
            connected: self.way()?,
            memory_mib,
            total_ms: total.as_secs_f64() * 1e3,
            downtime_ms: report.and_then(|report| report.downtime_ms),
            link_bytes: report.and_then(|report| report.link_bytes),
        })
    }
}

/// Returns what is counted per second, in steps, until it is over.
fn steps(over: &AtomicBool, began: Instant, counted: &dyn Fn() -> u64) -> Vec<f64> {
    let (mut steps, mut last) = (Vec::new(), counted());
    while !over.load(Ordering::Relaxed) {
        let due = STEP * (steps.len() as u32 + 1);
        thread::sleep(due.saturating_sub(began.elapsed()));
        let now = counted();
        steps.push((now - last) as f64 / STEP.as_secs_f64());
        last = now;
    }
    steps
}

impl ThroughputRow {
    fn show(&self) -> String {
        format!(
            "{:<16} {:<10} #{}  {} idle members of {} hosts, {}  forth {:<5} {:>8.1} Mbit/s  {:.2} \
             CPU s/GB, the agents {:.2}; other agents {:.2} CPU s",
            self.case,
            self.system,
            self.repeat,
            self.idle_members,
            self.idle_hosts,
            self.connected.as_deref().unwrap_or("not connected"),
            self.congestion,
            self.throughput_bps / 1e6,
            self.cpu_s_per_gb,
            self.agents_cpu_s_per_gb,
            self.other_agents_cpu_s
        )
    }
}

impl ServiceRow {
    fn show(&self) -> String {
        let (unit, scale) = match self.workload {
            "download" => ("Mbit/s", 8e-6),
            _ => ("requests/s", 1.0),
        };
        let ms = |value: Option<f64>| value.map_or("-".to_owned(), |ms| format!("{ms:.0} ms"));
        format!(
            "{:<16} {:<10} #{}  {}: before {:.1}, during {:.1}, after {:.1} {unit}; longest gap \
             {}, down {}; {}",
            self.case,
            self.workload,
            self.repeat,
            self.outcome,
            self.before_per_s * scale,
            self.during_per_s * scale,
            self.after_per_s * scale,
            ms(self.longest_gap_ms),
            ms(self.downtime_ms),
            self.connected.as_deref().unwrap_or("not connected"),
        )
    }
}

impl MoveRow {
    fn show(&self) -> String {
        format!(
            "{:<16} {:>4} MiB   #{}  {}: {:.1} s, down {}, {:.1} MB; {}",
            self.case,
            self.memory_mib,
            self.repeat,
            self.outcome,
            self.total_ms / 1e3,
            self.downtime_ms
                .map_or("-".to_owned(), |ms| format!("{ms:.0} ms")),
            self.link_bytes.unwrap_or_default() as f64 / 1e6,
            self.connected.as_deref().unwrap_or("not connected"),
        )
    }
}
