//! Prints worlds in readable form: actions, and the changes of a step.

use crate::machine::Machine;
use crate::step::Step;
use crate::world::{Message, SOURCE, World};

const HOSTS: [&str; 2] = ["A", "B"];
const SIDES: [&str; 2] = ["source", "destination"];

impl Machine {
    /// Returns the action of a step.
    pub(crate) fn tell_action(&self, world: &World, step: Step) -> String {
        let Step::Act { index, side, .. } = step else {
            return String::new();
        };
        let Some(action) = world.attempts[index].sides[side].todo.first() else {
            return String::new();
        };
        let text = if side == SOURCE {
            format!("{:?}", self.source.action(action))
        } else {
            format!("{:?}", self.destination.action(action))
        };
        // The name of a record is sufficient.
        let end = text.find(" {").unwrap_or(text.len());
        let closing = if end < text.len() { ")" } else { "" };
        format!(" - {}{closing}", &text[..end])
    }

    /// Returns the differences, a line each.
    pub(crate) fn tell_changes(&self, before: &World, after: &World) -> Vec<String> {
        let mut lines = Vec::new();
        for (index, (old, new)) in before.attempts.iter().zip(&after.attempts).enumerate() {
            for (side, name) in SIDES.iter().enumerate() {
                let (old, new) = (&old.sides[side], &new.sides[side]);
                if old.state != new.state {
                    let state = self.tell_state(side, new);
                    lines.push(format!("       {}: {name} is {state}", index + 1));
                }
            }
        }
        for (host, (old, new)) in before.hosts.iter().zip(&after.hosts).enumerate() {
            let name = HOSTS[host];
            if old.qemu != new.qemu {
                lines.push(format!("       {name}: QEMU {:?}", new.qemu));
            }
            if (old.holder, old.generation) != (new.holder, new.generation) {
                let (holder, generation) = (new.holder, new.generation);
                lines.push(format!("       {name}: right {holder:?}, {generation}"));
            }
        }
        let sent = after.net & !before.net;
        for bit in (0..32).filter(|bit| sent & (1 << bit) != 0) {
            let (message, index) = Message::of(bit);
            lines.push(format!("       {}: {message:?} is sent", index + 1));
        }
        if let Some(property) = after.broken {
            lines.push(format!("       BROKEN: {}", property.name()));
        }
        lines
    }

    fn tell_state(&self, side: usize, it: &crate::world::Side) -> String {
        if it.state == 0 {
            return it.ended.map_or_else(
                || "not there".to_owned(),
                |here| format!("over, here: {here}"),
            );
        }
        if side == SOURCE {
            format!("{:?}", self.source.state(it.state))
        } else {
            format!("{:?}", self.destination.state(it.state))
        }
    }
}
