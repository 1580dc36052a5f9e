//! Formats hosts, guests and migrations.

use super::doubt;
use super::fetching;
use super::figure::{self, UNKNOWN};
use crate::cli::paint::{Line, Tone, head, table};
use longhaul_api::{
    Guest, GuestOwner, GuestState, Host, Migration, Outcome, PathKind, ProbeResult, Qemu,
    RealmMember, Scope, Side, TrustedHost,
};
use longhaul_protocol::units::show_bytes;

/// Formats this host.
pub(crate) fn host(host: &Host) -> Vec<Line> {
    let mut lines = vec![Line::default().tone(Tone::Strong, host.name.clone())];
    let mut line = |name: &str, text: String| {
        lines.push(Line::text(format!("  {name}")).column(16).plain(text));
    };
    line("fingerprint", host.fingerprint.clone());
    let versions: Vec<String> = host.protocol_versions.iter().map(u32::to_string).collect();
    line(
        "agent",
        format!(
            "{}, pid {}, protocol {}",
            host.version,
            host.pid,
            versions.join(", ")
        ),
    );
    let listen = host.listen.as_deref().unwrap_or(UNKNOWN);
    line("for hosts", format!("{listen} (UDP)"));
    if let Some(api) = &host.api_listen {
        line("for commands", format!("{api} (TCP)"));
    }
    line("state folder", host.state_folder.clone());
    let qemus: Vec<String> = host.qemus.iter().map(qemu).collect();
    line(
        "QEMU",
        if qemus.is_empty() {
            "none".to_owned()
        } else {
            qemus.join(", ")
        },
    );
    if let Some(kvm) = host.kvm {
        let text = if kvm {
            "yes"
        } else {
            "no: guests run with TCG"
        };
        line("KVM", text.to_owned());
    }
    if let (Some(free), Some(total)) = (host.memory_free_bytes, host.memory_total_bytes) {
        line(
            "memory",
            format!("{} free of {}", show_bytes(free), show_bytes(total)),
        );
    }
    if let Some(guests) = host.guests_running {
        line("guests", format!("{guests} running"));
    }
    lines.push(Line::default());
    let port = listen.rsplit_once(':').map_or("PORT", |(_, port)| port);
    let address = match listen.rsplit_once(':') {
        Some((ip, _)) if !["0.0.0.0", "[::]"].contains(&ip) => listen.to_owned(),
        _ => format!("ADDRESS:{port}"),
    };
    lines.push(Line::text("To trust this host, on another:"));
    lines.push(Line::default().tone(
        Tone::Strong,
        format!(
            "  longhaul host trust {} {} {address}",
            host.name, host.fingerprint
        ),
    ));
    lines
}

fn qemu(qemu: &Qemu) -> String {
    let version = qemu.version.as_deref().unwrap_or("of an unknown version");
    format!("{version} ({})", qemu.path)
}

/// Formats the trusted hosts.
pub(crate) fn hosts(hosts: &[TrustedHost]) -> Vec<Line> {
    if hosts.is_empty() {
        return vec![
            Line::text("No host is trusted here. On the other host, `longhaul host` shows what to"),
            Line::text("type here."),
        ];
    }
    let mut rows = vec![head(&["host", "address", "may", "fingerprint"])];
    for host in hosts {
        rows.push(vec![
            Line::text(host.name.clone()),
            Line::text(host.addresses.join(" ")),
            Line::text(may(&host.may)),
            Line::text(host.fingerprint.clone()),
        ]);
    }
    table(rows)
}

/// Formats the hosts that this one knows: members of its realm, and those trusted by hand.
pub(crate) fn known_hosts(
    own: &str,
    members: &[RealmMember],
    trusted: &[TrustedHost],
) -> Vec<Line> {
    let by_hand = trusted.iter().filter(|host| {
        let mut members = members.iter();
        members.all(|member| member.fingerprint != host.fingerprint)
    });
    let by_hand: Vec<&TrustedHost> = by_hand.collect();
    let others = members.iter().any(|member| member.fingerprint != own);
    if !others && by_hand.is_empty() {
        return vec![
            Line::text("No other host is known here. Join a realm, or trust one by hand:"),
            Line::default().tone(Tone::Strong, "  longhaul host join TOKEN"),
            Line::default().tone(
                Tone::Strong,
                "  longhaul host trust NAME FINGERPRINT ADDRESS",
            ),
        ];
    }
    let mut rows = vec![head(&["host", "site", "path", "round trip", ""])];
    for member in members {
        if member.fingerprint == own {
            rows.push(vec![
                Line::text(member.name.clone()),
                Line::text(member.site.clone()),
                Line::text("this host"),
            ]);
            continue;
        }
        let path = member.path.as_ref();
        let kind = match path.and_then(|path| path.kind) {
            Some(PathKind::Direct) => "direct",
            Some(PathKind::Relayed) => "relayed",
            None => "none",
        };
        let round_trip = path.and_then(|path| path.round_trip_us);
        rows.push(vec![
            Line::text(member.name.clone()),
            Line::text(member.site.clone()),
            Line::text(kind),
            Line::text(round_trip.map_or(UNKNOWN.to_owned(), |us| {
                format!("{:.1} ms", us as f64 / 1e3)
            })),
            Line::text(path.map_or("not needed now", |path| &path.text).to_owned()),
        ]);
    }
    for host in by_hand {
        rows.push(vec![
            Line::text(host.name.clone()),
            Line::text(UNKNOWN),
            Line::text("direct"),
            Line::text(UNKNOWN),
            Line::text(format!("trusted by hand, at {}", host.addresses.join(" "))),
        ]);
    }
    table(rows)
}

/// Returns a host's permissions in words.
pub(crate) fn may(scopes: &[Scope]) -> String {
    if scopes.is_empty() {
        return "nothing".to_owned();
    }
    let names = scopes.iter().map(|scope| match scope {
        Scope::Query => "query",
        Scope::Send => "send",
    });
    names.collect::<Vec<_>>().join(", ")
}

/// Formats the guests.
pub(crate) fn guests(guests: &[Guest]) -> Vec<Line> {
    if guests.is_empty() {
        return vec![
            Line::text("No guest is described here. To start one:  ")
                .tone(Tone::Strong, "longhaul guests start FILE.toml"),
        ];
    }
    let mut rows = vec![head(&[
        "guest",
        "state",
        "owner",
        "QEMU",
        "machine",
        "accel",
        "vCPU",
        "memory",
        "pid",
        "generation",
    ])];
    let text = |value: Option<String>| Line::text(value.unwrap_or_else(|| UNKNOWN.to_owned()));
    for guest in guests {
        rows.push(vec![
            Line::text(guest.name.clone()),
            guest_state(guest),
            Line::text(owner(guest.owner)),
            text(guest.qemu.clone()),
            text(guest.machine_type.clone()),
            text(guest.accelerator.clone()),
            text(guest.vcpus.map(|count| count.to_string())),
            text(guest.memory_bytes.map(show_bytes)),
            text(guest.pid.map(|pid| pid.to_string())),
            text(guest.generation.map(|generation| generation.to_string())),
        ]);
    }
    let mut lines = table(rows);
    for guest in guests {
        let mut say = |what: String| {
            let line = Line::default().tone(Tone::Strong, guest.name.clone());
            lines.push(line.plain(format!(": {what}")));
        };
        if let Some(coming) = &guest.coming {
            say(coming.clone());
        }
        if let Some(obstacle) = &guest.obstacle {
            say(format!("cannot be moved: {obstacle}"));
        }
    }
    lines
}

fn owner(owner: GuestOwner) -> &'static str {
    match owner {
        GuestOwner::Longhaul => "Longhaul",
        GuestOwner::Attached => "attached",
        GuestOwner::Libvirt => "libvirt",
        GuestOwner::Proxmox => "Proxmox VE",
        GuestOwner::Other => "another",
    }
}

/// Formats a guest's state.
pub(crate) fn guest_state(guest: &Guest) -> Line {
    let (tone, name) = match guest.state {
        GuestState::Stopped => (Tone::Plain, "stopped"),
        GuestState::Running => (Tone::Good, "running"),
        GuestState::Paused => (Tone::Warn, "paused"),
        GuestState::MovingOut => (Tone::Good, "moving out"),
        GuestState::MovingIn => (Tone::Good, "moving in"),
        GuestState::Unresponsive => (Tone::Bad, "unresponsive"),
        GuestState::InDoubt => (Tone::Bad, "in doubt"),
        GuestState::Elsewhere => (Tone::Plain, "elsewhere"),
    };
    let line = Line::default().tone(tone, name);
    match &guest.state_detail {
        Some(detail) => line.plain(format!(" ({detail})")),
        None => line,
    }
}

/// Formats the migrations, with details of those in doubt and those with missing blocks.
pub(crate) fn migrations(migrations: &[Migration], now_unix_ms: u64, width: usize) -> Vec<Line> {
    if migrations.is_empty() {
        return vec![Line::text("No guest was moved from or to this host.")];
    }
    let ids: Vec<&str> = migrations.iter().map(|m| m.id.as_str()).collect();
    let mut rows = vec![head(&[
        "id", "guest", "from", "to", "state", "began", "took",
    ])];
    for migration in migrations {
        let (tone, state) = state(migration);
        let here = |side, name: &str| {
            let name = name.to_owned();
            if migration.side == side {
                Line::default().tone(Tone::Faint, format!("{name} (here)"))
            } else {
                Line::text(name)
            }
        };
        let took = migration
            .ended_unix_ms
            .map(|ended| ended.saturating_sub(migration.started_unix_ms));
        rows.push(vec![
            Line::text(short_id(&migration.id, &ids)),
            Line::text(migration.guest.clone()),
            here(Side::Source, &migration.source),
            here(Side::Destination, &migration.destination),
            Line::default().tone(tone, state),
            Line::text(figure::age(migration.started_unix_ms, now_unix_ms)),
            Line::text(figure::ms(took)),
        ]);
    }
    let mut lines = table(rows);
    for migration in migrations {
        if let Some(known) = &migration.doubt {
            let id = short_id(&migration.id, &ids);
            lines.push(Line::default());
            lines.extend(doubt::block(migration, known, id, now_unix_ms, width));
        }
        let left = fetching::block(migration, width);
        if !left.is_empty() {
            lines.push(Line::default());
            lines.extend(left);
        }
    }
    lines
}

/// Returns a migration's state in words.
pub(crate) fn state(migration: &Migration) -> (Tone, &'static str) {
    match migration.outcome {
        _ if lost(migration) => (Tone::Bad, "disconnected"),
        _ if migration.doubt.is_some() => (Tone::Bad, "in doubt"),
        None => (Tone::Good, figure::phase(migration.phase)),
        Some(Outcome::Completed) => (Tone::Plain, "completed"),
        Some(Outcome::Aborted) => (Tone::Plain, "stopped"),
        Some(Outcome::Failed) => (Tone::Bad, "failed"),
        Some(Outcome::InDoubt) => (Tone::Bad, "in doubt"),
    }
}

/// Returns whether the guest runs at the destination, and the agents have lost each other.
fn lost(migration: &Migration) -> bool {
    let doubt = migration.doubt.as_ref();
    doubt.is_some_and(doubt::belongs_to_destination)
}

/// Returns the shortest prefix of an id that is unique, and at least four digits.
pub(crate) fn short_id<'a>(id: &'a str, all: &[&str]) -> &'a str {
    let unique = |prefix: &str| {
        let mut others = all.iter().filter(|other| **other != id);
        !others.any(|other| other.starts_with(prefix))
    };
    (4..id.len())
        .filter_map(|length| id.get(..length))
        .find(|prefix| unique(prefix))
        .unwrap_or(id)
}

/// Formats the results of a probe.
pub(crate) fn probe(probe: &ProbeResult) -> Vec<Line> {
    let mut text = format!(
        "{}: {} round trip, {} from here to there",
        probe.host,
        figure::precise_ms(probe.rtt_ms),
        figure::bit_rate(probe.rate_bps)
    );
    if let Some(loss) = probe.loss {
        text.push_str(&format!(", {:.1} % lost", loss * 100.0));
    }
    let mut lines = vec![Line::default().tone(Tone::Good, "✓ ").plain(text)];
    if probe.rtt_loaded_ms.is_some() || probe.wire_rate_bps.is_some() {
        lines.push(Line::text(format!(
            "  while sending: {} round trip, {} on the wire",
            figure::precise_ms(probe.rtt_loaded_ms),
            figure::bit_rate(probe.wire_rate_bps)
        )));
    }
    let paths = figure::paths(&probe.paths);
    lines.extend(
        paths
            .into_iter()
            .map(|path| Line::text(format!("  {path}"))),
    );
    lines.push(Line::text(seen_as(probe)));
    lines
}

/// Returns how the other host sees this one.
fn seen_as(probe: &ProbeResult) -> String {
    let host = &probe.host;
    let Some(seen) = &probe.seen_as else {
        return format!("  how {host} sees this host is unknown: its agent does not report it");
    };
    match &probe.local_address {
        Some(local) if local == seen => format!("  {host} sees this host as {seen}: no NAT"),
        Some(local) => format!("  {host} sees this host as {seen}: behind a NAT, here {local}"),
        None => format!("  {host} sees this host as {seen}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;
    use crate::cli::paint::golden;
    use longhaul_api::HostPath;

    fn members() -> Vec<RealmMember> {
        let member = |name: &str, fingerprint: &str, path| RealmMember {
            name: name.to_owned(),
            fingerprint: fingerprint.to_owned(),
            site: name.to_owned(),
            may: vec![Scope::Send],
            pending: false,
            path,
        };
        let path = |kind, us: u64, text: &str| {
            Some(HostPath {
                kind: Some(kind),
                round_trip_us: Some(us),
                text: text.to_owned(),
            })
        };
        let direct = path(PathKind::Direct, 21_400, "direct to 203.0.113.7:7400");
        let relayed = "relayed by rendezvous.example:7401: UDP is blocked here";
        vec![
            member("paris", "1", None),
            member("oslo", "2", direct),
            member("porto", "3", path(PathKind::Relayed, 64_000, relayed)),
            member("turin", "4", None),
        ]
    }

    #[test]
    fn lists() {
        golden::check_lines("host", &host(&sample::host()), 160);
        golden::check_lines("hosts", &hosts(&sample::trusted_hosts()), 160);
        golden::check_lines("hosts_none", &hosts(&[]), 80);
        golden::check_lines("known_hosts", &known_hosts("1", &members(), &[]), 120);
        golden::check_lines("known_hosts_none", &known_hosts("1", &[], &[]), 80);
        golden::check_lines("guests", &guests(&sample::guests()), 120);
        golden::check_lines("guests_none", &guests(&[]), 80);
        let list = sample::migrations();
        golden::check_lines(
            "migrations",
            &migrations(&list, 1_800_000_100_000, 120),
            120,
        );
        golden::check_lines("migrations_none", &migrations(&[], 0, 80), 80);
        let mut measured = sample::probe();
        golden::check_lines("probe", &probe(&measured), 80);
        measured.local_address = measured.seen_as.clone();
        golden::check_lines("probe_no_nat", &probe(&measured), 80);
        measured.seen_as = None;
        golden::check_lines("probe_older_agent", &probe(&measured), 80);
    }

    #[test]
    fn ids_are_as_long_as_needed() {
        let ids = ["7f3a0000", "7f3a0100", "81000000"];
        assert_eq!(short_id(ids[0], &ids), "7f3a00");
        assert_eq!(short_id(ids[2], &ids), "8100");
        assert_eq!(short_id("7f", &["7f"]), "7f");
    }
}
