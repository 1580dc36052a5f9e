//! Formats the QEMU processes of a host.

use super::figure::UNKNOWN;
use crate::cli::paint::{Line, Tone, head, table};
use longhaul_api::{DiscoveredGuest, GuestOwner, QmpSocket, QmpSocketState};

/// Formats the processes, and what would keep the agent from attaching to them.
pub(crate) fn guests(guests: &[DiscoveredGuest]) -> Vec<Line> {
    if guests.is_empty() {
        return vec![Line::text("No QEMU runs on this host.")];
    }
    let mut rows = vec![head(&[
        "pid",
        "user",
        "name",
        "owner",
        "QMP socket",
        "attach",
    ])];
    for guest in guests {
        let sockets: Vec<String> = guest.sockets.iter().map(socket).collect();
        let sockets = match sockets.is_empty() {
            true => "none".to_owned(),
            false => sockets.join(" "),
        };
        let name = guest.guest.as_ref().or(guest.name.as_ref());
        rows.push(vec![
            Line::text(guest.pid.to_string()),
            Line::text(guest.user.clone()),
            Line::text(name.cloned().unwrap_or_else(|| UNKNOWN.to_owned())),
            Line::text(guest.owner_detail.clone()),
            Line::text(sockets),
            attach(guest),
        ]);
    }
    let mut lines = table(rows);
    for guest in guests.iter().filter(|guest| !guest.obstacles.is_empty()) {
        lines.push(Line::default());
        let name = guest.name.as_ref();
        let name = name.map_or(String::new(), |name| format!(" ({name})"));
        lines.push(Line::default().tone(Tone::Strong, format!("pid {}{name}", guest.pid)));
        for obstacle in &guest.obstacles {
            lines.push(Line::text(format!("  {}", obstacle.message)));
            for hint in obstacle.hint.lines() {
                lines.push(Line::default().tone(Tone::Faint, format!("    {hint}")));
            }
        }
        if guest.more_obstacles > 0 {
            let more = guest.more_obstacles;
            lines.push(Line::text(format!("  and {more} more")));
        }
    }
    let ready = guests.iter().find(|guest| guest.attachable == Some(true));
    let free = |socket: &&QmpSocket| socket.state == QmpSocketState::Free;
    if let Some(guest) = ready
        && let Some(socket) = guest.sockets.iter().find(free)
    {
        lines.push(Line::default());
        let command = format!("longhaul guests attach NAME --qmp {}", socket.path);
        lines.push(Line::text("To attach to one:  ").tone(Tone::Strong, command));
    }
    lines
}

fn socket(socket: &QmpSocket) -> String {
    let path = &socket.path;
    match socket.state {
        QmpSocketState::Free => path.clone(),
        QmpSocketState::Busy => format!("{path} (in use)"),
        QmpSocketState::Unreachable => format!("{path} (unreachable)"),
    }
}

fn attach(guest: &DiscoveredGuest) -> Line {
    match (guest.attachable, guest.owner) {
        (Some(true), _) => Line::default().tone(Tone::Good, "possible"),
        (Some(false), _) => Line::default().tone(Tone::Bad, "refused"),
        (None, GuestOwner::Longhaul | GuestOwner::Attached) => Line::text("known here"),
        (None, GuestOwner::Libvirt | GuestOwner::Proxmox) => {
            Line::default().tone(Tone::Bad, "managed by another program")
        }
        (None, GuestOwner::Other) => Line::default().tone(Tone::Warn, "no free QMP socket"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::paint::golden;
    use longhaul_api::Obstacle;

    fn guest(pid: u32, name: &str, owner: GuestOwner, detail: &str) -> DiscoveredGuest {
        DiscoveredGuest {
            pid,
            user: "libvirt-qemu".to_owned(),
            name: Some(name.to_owned()),
            owner,
            owner_detail: detail.to_owned(),
            guest: None,
            sockets: Vec::new(),
            attachable: None,
            obstacles: Vec::new(),
            more_obstacles: 0,
        }
    }

    #[test]
    fn processes_are_shown_with_what_keeps_them() {
        let socket = |path: &str, state| QmpSocket {
            path: path.to_owned(),
            state,
        };
        let ours = DiscoveredGuest {
            user: "longhaul".to_owned(),
            guest: Some("web-7".to_owned()),
            sockets: vec![socket(
                "/var/lib/longhaul/guests/web-7/run/qmp",
                QmpSocketState::Busy,
            )],
            ..guest(812, "web-7", GuestOwner::Longhaul, "Longhaul")
        };
        let ready = DiscoveredGuest {
            user: "root".to_owned(),
            sockets: vec![socket("/run/db.qmp", QmpSocketState::Free)],
            attachable: Some(true),
            ..guest(1440, "db", GuestOwner::Other, "`start-db.sh` (pid 1400)")
        };
        let refused = DiscoveredGuest {
            user: "root".to_owned(),
            sockets: vec![socket("/run/mail.qmp", QmpSocketState::Free)],
            attachable: Some(false),
            obstacles: vec![Obstacle {
                message: "card net0 reaches the world through this host (user network)".to_owned(),
                hint: "start the guest with a card on a bridge, or with restrict=on".to_owned(),
            }],
            more_obstacles: 2,
            ..guest(1502, "mail", GuestOwner::Other, "systemd (mail.service)")
        };
        let domain = guest(2001, "old", GuestOwner::Libvirt, "libvirt (domain old)");
        let lines = guests(&[ours, ready, refused, domain]);
        golden::check_lines("discovered", &lines, 140);
        golden::check_lines("discovered_none", &guests(&[]), 100);
    }
}
