//! Implements `longhaul doctor`: checks whether this host can move guests, and advises what to do
//! about each fault.

use crate::cli::args::DoctorArgs;
use crate::cli::error::CliError;
use crate::cli::output::Output;
use crate::cli::paint::{Line, Tone};
use crate::cli::self_test;
use longhaul_api::{Client, Host, Probe, Realm, RealmStanding};
use longhaul_hypervisor::Accelerator;
use longhaul_hypervisor::capabilities::{Capabilities, Prober, QemuAccount, USERFAULTFD_HINT};
use longhaul_hypervisor::config::{HostConfig, Network, RunsAsRoot};
use longhaul_hypervisor::tested;
use longhaul_migration::host::config::Config;
use longhaul_migration::host::limited_hosts;
use longhaul_protocol::MigrationId;
use longhaul_protocol::units::show_bytes;
use longhaul_storage::{file_name, list_journals, read_sound_journal};
use nix::sys::statvfs::statvfs;
use serde::Serialize;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::timeout;

/// Space for journals, descriptions and logs of many moves.
const FREE_BYTES_MIN: u64 = 256 << 20;
/// The limit for a sync; a downtime contains up to three.
const SYNC_MAX: Duration = Duration::from_millis(50);
const SYNCS: usize = 5;
/// The time limit for starting every emulator, and for trying KVM.
const PROBE_WITHIN: Duration = Duration::from_secs(120);
const HOST_WITHIN: Duration = Duration::from_secs(30);
/// A probe long enough to see that a host answers.
const PROBE: Probe = Probe {
    seconds: 1,
    bandwidth_bps: Some(1_000_000),
};

/// The state of a checked item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum State {
    Good,
    Warning,
    Bad,
}

/// The result of one check.
#[derive(Debug, Serialize)]
struct Finding {
    what: String,
    state: State,
    text: String,
    /// The advice.
    hint: Option<String>,
}

impl Finding {
    fn good(what: &str, text: impl Into<String>) -> Self {
        Self {
            what: what.to_owned(),
            state: State::Good,
            text: text.into(),
            hint: None,
        }
    }

    fn not(what: &str, state: State, text: impl Into<String>, hint: &str) -> Self {
        Self {
            what: what.to_owned(),
            state,
            text: text.into(),
            hint: Some(hint.to_owned()),
        }
    }

    fn line(&self) -> Vec<Line> {
        let (tone, mark) = match self.state {
            State::Good => (Tone::Good, "✓"),
            State::Warning => (Tone::Warn, "!"),
            State::Bad => (Tone::Bad, "✗"),
        };
        let line = Line::default().tone(tone, mark);
        let mut lines = vec![line.plain(format!(" {:<14} {}", self.what, self.text))];
        let hint = self.hint.as_ref();
        lines.extend(hint.map(|hint| Line::text(format!("{:17}to do: {hint}", ""))));
        lines
    }
}

/// Runs all checks, or tests moves; the exit code is 0 when everything is well.
pub(super) async fn doctor(
    client: Client,
    output: &Output,
    args: DoctorArgs,
) -> Result<u8, CliError> {
    let config = Config::read(args.config.as_deref());
    if args.self_test {
        return self_test::run(output, &config?, args.moves).await;
    }
    let mut findings = Vec::new();
    match &config {
        Ok(config) => {
            findings.push(Finding::good(
                "configuration",
                format!("{} is sound", config.name),
            ));
            emulators(&config.hypervisor, &mut findings).await;
            findings.extend(user(&config.hypervisor));
        }
        Err(error) => {
            let hint = error.hint.as_deref().unwrap_or("fix it");
            findings.push(Finding::not(
                "configuration",
                State::Bad,
                error.to_string(),
                hint,
            ));
        }
    }
    let config = config.ok();
    let host = agent(&client, &mut findings).await;
    let state = host.as_ref().map(|host| host.state_folder.clone().into());
    if let Some(host) = &host {
        findings.extend(images(host));
    }
    if let Some(state) = state.or_else(|| config.as_ref().map(|config| config.state.clone())) {
        findings.push(space(&state));
        findings.push(syncs(&state));
        findings.extend(journals(&state));
    }
    findings.push(clock());
    if host.is_some() {
        let realm = match client.realm().await {
            Ok(status) => status.realm,
            Err(error) => {
                let hint = "correct STATE/realm-member, or leave the realm: longhaul host leave";
                findings.push(Finding::not("realm", State::Bad, error.to_string(), hint));
                None
            }
        };
        findings.extend(realm.iter().flat_map(in_realm));
        findings.extend(bridges(config.as_ref(), realm.as_ref()));
        findings.extend(realm.iter().flat_map(gateways));
        findings.extend(realm.as_ref().and_then(closed_tables));
        hosts(&client, (config.as_ref(), realm.is_some()), &mut findings).await;
    }
    let bad = findings.iter().any(|finding| finding.state == State::Bad);
    if output.json {
        output.document(&serde_json::json!({ "findings": findings }))?;
    } else {
        let lines: Vec<Line> = findings.iter().flat_map(Finding::line).collect();
        output.lines(&lines)?;
    }
    Ok(u8::from(bad))
}

/// Queries every emulator, and tests whether a guest really runs with KVM, as an agent does.
async fn emulators(config: &HostConfig, findings: &mut Vec<Finding>) {
    let folder = std::env::temp_dir().join(format!("lh-doctor-{}", std::process::id()));
    let config = HostConfig {
        state: folder.clone(),
        ..config.clone()
    };
    let prober = Prober::new(Arc::new(config));
    let asked = timeout(PROBE_WITHIN, prober.capabilities()).await;
    let keeps = match &asked {
        Ok(Ok(capabilities)) => memory_may_follow(&prober, capabilities).await,
        _ => None,
    };
    // The folder is for the prober alone.
    let _ = std::fs::remove_dir_all(&folder);
    let install = "install QEMU (Debian: apt install qemu-system-x86), or name it under \
                   [qemu.emulators]";
    let capabilities = match asked {
        Ok(Ok(capabilities)) => capabilities,
        Ok(Err(error)) => {
            return findings.push(Finding::not("QEMU", State::Bad, error.to_string(), install));
        }
        Err(_) => {
            let text = format!("no answer within {} s", PROBE_WITHIN.as_secs());
            return findings.push(Finding::not("QEMU", State::Bad, text, install));
        }
    };
    let versions = capabilities.emulators.iter();
    let versions: Vec<(&str, &str)> = versions
        .map(|(label, emulator)| (label.as_str(), emulator.version.as_str()))
        .collect();
    findings.push(match versions.is_empty() {
        true => Finding::not("QEMU", State::Bad, "there is none", install),
        false => {
            let versions = versions.iter();
            let versions = versions.map(|(label, version)| format!("{label} ({version})"));
            Finding::good("QEMU", versions.collect::<Vec<_>>().join(", "))
        }
    });
    findings.extend(newer_than_tested(&versions));
    findings.push(match (&capabilities.no_kvm, capabilities.accelerator) {
        (_, Accelerator::Kvm) => Finding::good("accelerator", "kvm: a guest ran with it"),
        (Some(why), _) => Finding::not(
            "accelerator",
            State::Warning,
            format!("tcg, slowly; KVM does not work: {why}"),
            "load kvm_intel or kvm_amd, switch virtualization on in the firmware, or (inside a \
             virtual machine) allow nesting on its host",
        ),
        (None, _) => Finding::good("accelerator", "tcg, as configured"),
    });
    findings.extend(keeps);
}

/// Returns whether the memory of guests may follow them here (`--strategy hybrid`, `postcopy`).
async fn memory_may_follow(prober: &Prober, capabilities: &Capabilities) -> Option<Finding> {
    let what = "userfaultfd";
    let emulator = capabilities.emulators.get(&capabilities.default)?;
    let machine = emulator.machine_types.keys().next()?;
    let asked = prober.keeps_memory_from_following(machine, QemuAccount::Configured);
    let asked = timeout(PROBE_WITHIN, asked).await;
    Some(match asked {
        Ok(None) => Finding::good(what, "memory can follow a guest to this host"),
        Ok(Some(why)) => {
            let text = format!("memory cannot follow a guest to this host: {why}");
            Finding::not(what, State::Warning, text, USERFAULTFD_HINT)
        }
        Err(_) => return None,
    })
}

/// Returns the user that QEMU runs as, unless that is the agent's.
fn user(config: &HostConfig) -> Option<Finding> {
    let what = "QEMU's user";
    match (config.qemu.check_user(), &config.qemu.run_as) {
        (Err(error), _) => {
            let text = error.to_string();
            Some(Finding::not(what, State::Bad, text, RunsAsRoot::HINT))
        }
        (Ok(()), Some(user)) => Some(Finding::good(what, user.as_str())),
        (Ok(()), None) => None,
    }
}

/// Returns the emulators that are newer than those that Longhaul is tested with, from all by label
/// and version.
fn newer_than_tested(emulators: &[(&str, &str)]) -> Vec<Finding> {
    let newer = |(label, version): &(&str, &str)| {
        let text = tested::warning(version, "this host")?;
        Some(Finding::not(
            "QEMU",
            State::Warning,
            format!("{label}: {text}"),
            &format!(
                "longhaul doctor --self-test, with [qemu] default = \"{label}\": it moves a guest \
                 here, and looks whether all of it arrives"
            ),
        ))
    };
    emulators.iter().filter_map(newer).collect()
}

async fn agent(client: &Client, findings: &mut Vec<Finding>) -> Option<Host> {
    match timeout(PROBE_WITHIN, client.host()).await {
        Ok(Ok(host)) => {
            let own = env!("CARGO_PKG_VERSION");
            let text = format!(
                "{} answers: version {}, pid {}",
                host.name, host.version, host.pid
            );
            findings.push(match host.version == own {
                true => Finding::good("agent", text),
                false => Finding::not(
                    "agent",
                    State::Warning,
                    format!("{text}; this command is {own}"),
                    "restart the agent (guests go on running): systemctl restart longhaul-agent",
                ),
            });
            Some(host)
        }
        Ok(Err(error)) => {
            let hint = error.hint();
            let hint = hint.unwrap_or_else(|| "systemctl status longhaul-agent".to_owned());
            findings.push(Finding::not("agent", State::Bad, error.to_string(), &hint));
            None
        }
        Err(_) => {
            let hint = "journalctl -u longhaul-agent";
            findings.push(Finding::not(
                "agent",
                State::Bad,
                "it does not answer",
                hint,
            ));
            None
        }
    }
}

/// Returns the places of images in which the agent may not write, as it sees them itself: its
/// unit's sandbox is not this command's.
fn images(host: &Host) -> Vec<Finding> {
    let not_writable = host.not_writable.iter();
    not_writable
        .map(|one| {
            let text = format!("{}: disks there cannot move", one.text);
            Finding::not("images", State::Warning, text, &one.hint)
        })
        .collect()
}

fn space(state: &Path) -> Finding {
    match statvfs(state) {
        Err(error) => Finding::not(
            "space",
            State::Warning,
            format!("{}: {error}", state.display()),
            "start the agent once: it makes the folder",
        ),
        Ok(found) => {
            let free = found.blocks_available() * found.fragment_size();
            let text = format!("{} free in {}", show_bytes(free), state.display());
            match free < FREE_BYTES_MIN {
                true => Finding::not("space", State::Bad, text, "make room: journals need it"),
                false => Finding::good("space", text),
            }
        }
    }
}

/// Measures how long a record takes to become durable.
fn syncs(state: &Path) -> Finding {
    let file = state.join(format!("doctor-{}", std::process::id()));
    let measured = measure(&file);
    // If it could not be created there is nothing to remove.
    let _ = std::fs::remove_file(&file);
    match measured {
        Err(error) => Finding::not(
            "journal",
            State::Warning,
            format!("cannot measure how long a sync takes: {error}"),
            "run longhaul doctor as the agent's user (root)",
        ),
        Ok(time) => {
            let text = format!(
                "a record is durable after {:.1} ms",
                time.as_secs_f64() * 1e3
            );
            match time > SYNC_MAX {
                true => Finding::not(
                    "journal",
                    State::Warning,
                    format!("{text}: a downtime has three of these"),
                    "put `state` on a faster disk; one with a write cache that survives a power \
                     cut is best",
                ),
                false => Finding::good("journal", text),
            }
        }
    }
}

/// Returns the journals that hold a guest, or all of them.
fn journals(state: &Path) -> Vec<Finding> {
    let folder = state.join("journal");
    let ids = match list_journals(&folder) {
        Ok(ids) => ids,
        Err(error) => {
            let hint = "run longhaul doctor as the agent's user (root)";
            let text = error.to_string();
            return vec![Finding::not("journals", State::Warning, text, hint)];
        }
    };
    let unusable = |id: MigrationId| {
        let error = read_sound_journal(&folder.join(file_name(id))).err()?;
        // One that has just been removed is of no concern.
        let hint = match (error.is_newer(), error.is_of_the_file()) {
            (true, _) => "start the version of Longhaul that wrote it".to_owned(),
            (false, true) => format!(
                "its guest is held: compare with the other host's journal, stop the agent, and \
                 longhaul journal set-aside {id}"
            ),
            (false, false) => return None,
        };
        Some(Finding::not(
            "journals",
            State::Bad,
            error.to_string(),
            &hint,
        ))
    };
    ids.into_iter().filter_map(unusable).collect()
}

fn measure(path: &Path) -> std::io::Result<Duration> {
    let mut file = File::create_new(path)?;
    let mut times = Vec::new();
    for _ in 0..SYNCS {
        let began = Instant::now();
        file.write_all(&[0x55; 512])?;
        file.sync_all()?;
        times.push(began.elapsed());
    }
    times.sort();
    Ok(times[SYNCS / 2])
}

fn clock() -> Finding {
    let asked = Command::new("timedatectl")
        .args(["show", "--property=NTPSynchronized", "--value"])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output();
    let answer = asked.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    match answer.as_deref() {
        Ok("yes") => Finding::good("clock", "synchronized"),
        Ok("no") => Finding::not(
            "clock",
            State::Warning,
            "not synchronized",
            "timedatectl set-ntp true (a guest without an agent keeps its own clock, but reports \
             of two hosts are easier to compare)",
        ),
        _ => Finding::good("clock", "nobody here says whether it is synchronized"),
    }
}

/// Returns what this host's realm lacks here.
fn in_realm(realm: &Realm) -> Vec<Finding> {
    let what = "realm";
    let mut findings = Vec::new();
    findings.push(match (realm.standing, &realm.reason) {
        (RealmStanding::Member, _) => Finding::good(what, "this host is a member"),
        (RealmStanding::Pending, _) => Finding::not(
            what,
            State::Warning,
            "this host is a member until its token's term ends",
            "the operator lists it: longhaul realm publish",
        ),
        (RealmStanding::Expired | RealmStanding::Stranger, reason) => Finding::not(
            what,
            State::Bad,
            reason.as_deref().unwrap_or("this host is no member"),
            "the operator publishes the ruleset again, or invites this host again",
        ),
    });
    for server in &realm.servers {
        if !server.registered {
            let why = server.error.as_deref().unwrap_or("it does not answer yet");
            let text = format!("rendezvous server {}: {why}", server.addresses.join(" "));
            let hint = "is it running, and do UDP port 7401 or TCP port 443 get through to it?";
            findings.push(Finding::not(what, State::Warning, text, hint));
        }
    }
    for network in &realm.networks {
        if let Some(error) = &network.error {
            let text = format!("network {} is not open here: {error}", network.name);
            let hint = "remove what is in its way; the agent tries again every 10 s";
            findings.push(Finding::not(what, State::Bad, text, hint));
        }
    }
    findings
}

/// Returns a warning if rules of iptables apply to the frames of bridges that guests use.
fn bridges(config: Option<&Config>, realm: Option<&Realm>) -> Option<Finding> {
    let is_bridge = |network: &Network| matches!(network, Network::Bridge(_));
    let configured = config.is_some_and(|config| {
        let mut networks = config.hypervisor.networks.values();
        networks.any(is_bridge)
    });
    let of_realm = realm.is_some_and(|realm| {
        let mut networks = realm.networks.iter();
        networks.any(|network| network.bridge.is_some())
    });
    let filtered = std::fs::read_to_string("/proc/sys/net/bridge/bridge-nf-call-iptables");
    let filtered = filtered.is_ok_and(|value| value.trim() == "1");
    ((configured || of_realm) && filtered).then(|| {
        Finding::not(
            "bridges",
            State::Warning,
            "iptables filters frames between the ports of bridges (Docker turns that on): guests \
             may not reach anybody",
            "sysctl net.bridge.bridge-nf-call-iptables=0, or: iptables -I FORWARD -m physdev \
             --physdev-is-bridged -j ACCEPT",
        )
    })
}

/// Returns what keeps guests from getting out through gateways.
fn gateways(realm: &Realm) -> Vec<Finding> {
    let what = "gateway";
    let networks = realm.networks.iter();
    let gateways = networks.filter_map(|network| Some((&network.name, network.gateway.as_ref()?)));
    let findings = gateways.map(|(network, gateway)| {
        let addresses = gateway.addresses.join(", ");
        let text = format!("{addresses} of network {network}");
        match (&gateway.error, &gateway.device, &gateway.near) {
            (Some(error), _, _) => Finding::not(
                what,
                State::Bad,
                format!("{text}: {error}"),
                gateway_hint(error),
            ),
            (None, Some(device), _) => match forwards(device) {
                true => Finding::good(what, format!("{text}: device {device} here")),
                false => Finding::not(
                    what,
                    State::Bad,
                    format!("{text}: the kernel does not forward what comes from {device}"),
                    &format!(
                        "something has changed it: sysctl net.ipv4.conf.{device}.forwarding=1"
                    ),
                ),
            },
            (None, None, Some(near)) => {
                Finding::good(what, format!("{text}: guests here leave by {near}"))
            }
            (None, None, None) => Finding::not(
                what,
                State::Warning,
                format!("{text}: no host has it"),
                "the operator names sites of members: longhaul network gateway",
            ),
        }
    });
    findings.collect()
}

/// Returns a warning if rules of others drop what is forwarded, where this host has a gateway.
fn closed_tables(realm: &Realm) -> Option<Finding> {
    let mut gateways = realm.networks.iter().filter_map(|it| it.gateway.as_ref());
    gateways.find(|gateway| gateway.device.is_some())?;
    // Without nftables the agent has said so.
    let listed = Command::new("nft")
        .args(["-j", "list", "chains"])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output();
    let listed = serde_json::from_slice(&listed.ok()?.stdout).ok()?;
    let closed = dropping(&listed);
    (!closed.is_empty()).then(|| {
        Finding::not(
            "gateway",
            State::Warning,
            format!(
                "{} drops what it is not told to forward: guests may not get out",
                closed.join(", ")
            ),
            "let what comes from and goes to lg* pass there; for iptables: iptables -I FORWARD -i \
             lg+ -j ACCEPT; iptables -I FORWARD -o lg+ -j ACCEPT",
        )
    })
}

/// Returns the chains of nftables that drop forwarded IPv4 packets by default.
fn dropping(listed: &serde_json::Value) -> Vec<String> {
    let objects = listed["nftables"].as_array().into_iter().flatten();
    let chains = objects.map(|object| &object["chain"]);
    let closed = chains.filter(|chain| {
        let family = chain["family"].as_str();
        chain["hook"] == "forward"
            && chain["policy"] == "drop"
            && matches!(family, Some("ip" | "inet"))
    });
    let name = |chain: &serde_json::Value| {
        let word = |key: &str| chain[key].as_str().unwrap_or("?").to_owned();
        format!("chain {} of table {}", word("name"), word("table"))
    };
    closed.map(name).collect()
}

/// Whether the kernel forwards what comes from a device. One that this command does not see, as
/// in another network namespace, is taken for good.
fn forwards(device: &str) -> bool {
    let path = format!("/proc/sys/net/ipv4/conf/{device}/forwarding");
    std::fs::read_to_string(path).map_or(true, |value| value.trim() == "1")
}

fn gateway_hint(error: &str) -> &'static str {
    if error.contains("cannot start nft") {
        "install nftables (Debian: apt install nftables); the agent tries again every 10 s"
    } else if error.contains("/proc/sys/net") {
        "the agent's unit needs ReadWritePaths=/proc/sys/net, as the packaged one has"
    } else {
        "remove what is in its way; the agent tries again every 10 s"
    }
}

async fn hosts(
    client: &Client,
    (config, in_realm): (Option<&Config>, bool),
    findings: &mut Vec<Finding>,
) {
    let hosts = match client.hosts().await {
        Ok(list) => list.hosts,
        Err(error) => {
            let hint = "correct STATE/trust.toml";
            return findings.push(Finding::not("hosts", State::Bad, error.to_string(), hint));
        }
    };
    if let Some(config) = config {
        let trusted = hosts.iter();
        let trusted = trusted.map(|host| (host.fingerprint.clone(), host.name.clone()));
        findings.extend(limits(config, &trusted.collect::<Vec<_>>()));
    }
    if hosts.is_empty() && !in_realm {
        findings.push(Finding::not(
            "hosts",
            State::Warning,
            "no other host is trusted",
            "join a realm (longhaul host join TOKEN), or trust one by hand: longhaul host, here \
             and on the other host, shows the line to type",
        ));
    }
    for host in hosts {
        let what = format!("host {}", host.name);
        let hint = "is its agent running, the UDP port open, and does it trust this host?";
        findings.push(
            match timeout(HOST_WITHIN, client.probe(&host.name, &PROBE)).await {
                Ok(Ok(result)) => {
                    let version = result.version.unwrap_or_else(|| "unknown".to_owned());
                    let rtt = result
                        .rtt_ms
                        .map_or(String::new(), |rtt| format!(", {rtt:.1} ms away"));
                    Finding::good(&what, format!("answers: {version}{rtt}"))
                }
                Ok(Err(error)) => {
                    let own = error.hint();
                    let hint = own.as_deref().unwrap_or(hint);
                    Finding::not(&what, State::Warning, error.to_string(), hint)
                }
                Err(_) => Finding::not(&what, State::Warning, "does not answer", hint),
            },
        );
    }
}

/// Returns the tables of limits that do not do what their names say.
fn limits(config: &Config, trusted: &[(String, String)]) -> Vec<Finding> {
    let hint = "longhaul host list shows names and fingerprints: [hosts.NAME.limits], or \
                [hosts.\"FINGERPRINT\".limits]";
    match limited_hosts::warnings(config, trusted) {
        Ok(warnings) => {
            let warnings = warnings.into_iter();
            warnings
                .map(|text| Finding::not("limits", State::Warning, text, hint))
                .collect()
        }
        Err(error) => {
            let text = format!("cannot read which hosts have limits of their own: {error}");
            let hint = "run longhaul doctor as the agent's user (root)";
            vec![Finding::not("limits", State::Warning, text, hint)]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_api::{RealmGateway, RealmNetwork};

    #[test]
    fn what_keeps_guests_from_their_gateway_is_named() {
        let gateway = RealmGateway {
            addresses: vec!["10.0.0.1/24".to_owned()],
            mac: "02:6c:68:00:00:01".to_owned(),
            hosts: Vec::new(),
            device: None,
            near: None,
            flows: 0,
            elsewhere: 0,
            forgotten: 0,
            given_up: 0,
            spoofed: 0,
            error: None,
        };
        let check = |gateway: RealmGateway| {
            let realm = Realm {
                id: String::new(),
                name: None,
                standing: RealmStanding::Member,
                reason: None,
                version: 1,
                expires_s: None,
                members: Vec::new(),
                networks: vec![RealmNetwork {
                    name: "blue".to_owned(),
                    id: String::new(),
                    members: Vec::new(),
                    mtu: 1500,
                    bridge: None,
                    error: None,
                    gateway: Some(gateway),
                }],
                servers: Vec::new(),
                notices: Vec::new(),
            };
            let [finding] = &gateways(&realm)[..] else {
                panic!("one gateway");
            };
            let hint = finding.hint.clone().unwrap_or_default();
            (finding.state, format!("{}; {hint}", finding.text))
        };
        let with = |change: fn(&mut RealmGateway)| {
            let mut changed = gateway.clone();
            change(&mut changed);
            check(changed)
        };
        let (state, said) = check(gateway.clone());
        assert!(
            state == State::Warning && said.contains("no host has it"),
            "{said}"
        );
        let (state, said) = with(|it| it.near = Some("oslo".to_owned()));
        assert!(
            state == State::Good && said.contains("leave by oslo"),
            "{said}"
        );
        let (state, said) = with(|it| it.device = Some("lgnone".to_owned()));
        assert!(
            state == State::Good && said.contains("device lgnone"),
            "{said}"
        );
        for (error, hint) in [
            ("cannot start nft: not found", "apt install nftables"),
            ("cannot set /proc/sys/net/ipv4: read-only", "ReadWritePaths"),
            ("this host has a route", "in its way"),
        ] {
            let mut faulty = gateway.clone();
            faulty.error = Some(error.to_owned());
            let (state, said) = check(faulty);
            assert!(state == State::Bad && said.contains(hint), "{said}");
        }
        let chain = |family: &str, hook: &str, policy: &str| {
            serde_json::json!({ "chain": {
                "family": family, "table": "filter", "name": "FORWARD", "hook": hook,
                "policy": policy,
            }})
        };
        let listed = serde_json::json!({ "nftables": [
            { "metainfo": {} },
            chain("ip", "forward", "drop"),
            chain("ip6", "forward", "drop"),
            chain("ip", "input", "drop"),
            chain("inet", "forward", "accept"),
        ]});
        assert_eq!(dropping(&listed), ["chain FORWARD of table filter"]);
    }

    #[test]
    fn an_emulator_that_is_newer_than_what_is_tested_is_named() {
        let emulators = [("debian", "10.0.2"), ("own", "12.0.1"), ("next", "11.1.50")];
        let findings = newer_than_tested(&emulators);
        let texts: Vec<&str> = findings.iter().map(|one| one.text.as_str()).collect();
        assert_eq!(
            texts,
            [
                "own: QEMU 12.0.1 on this host is newer than those that Longhaul is tested with \
                 (up to 11.1)",
                "next: QEMU 11.1.50 on this host is newer than those that Longhaul is tested with \
                 (up to 11.1)",
            ]
        );
        let all_warn = findings.iter().all(|one| one.state == State::Warning);
        assert!(all_warn, "{findings:?}");
        let hint = findings[0].hint.as_deref().unwrap();
        assert!(hint.starts_with("longhaul doctor --self-test"), "{hint}");
    }

    #[test]
    fn a_sync_is_measured_and_nothing_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let finding = syncs(folder.path());
        assert!(finding.text.contains("durable after"), "{finding:?}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let finding = syncs(Path::new("/nonexistent"));
        assert_eq!(finding.state, State::Warning, "{finding:?}");
    }
}
